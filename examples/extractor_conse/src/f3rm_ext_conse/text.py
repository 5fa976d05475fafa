"""Sentence embeddings of all-MiniLM-L6-v2 through onnxruntime."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float32

MODEL_FILE, TOKENIZER_FILE = "model_quantized.onnx", "tokenizer.json"
_MAX_TOKENS = 128


class SentenceEncoder:
    """Turns text into unit vectors: transformer, mean over the tokens, normalisation."""

    def __init__(self, folder: Path) -> None:
        import onnxruntime
        from tokenizers import Tokenizer

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(
            str(folder / MODEL_FILE), sess_options=options, providers=["CPUExecutionProvider"]
        )
        self._inputs = {value.name for value in self._session.get_inputs()}
        self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        self._tokenizer.enable_truncation(_MAX_TOKENS)
        self._tokenizer.no_padding()

    def encode(self, sentences: Sequence[str]) -> Float32[np.ndarray, "sentences feat"]:
        """Returns unit-norm embeddings.

        Sentences go through the network one at a time, because the quantised model scales its activations per batch:
        in a batch, an embedding would depend on its neighbours.
        """
        if not sentences:
            return self.encode([""])[:0]
        return np.concatenate([self._encode_one(sentence) for sentence in sentences])

    def _encode_one(self, sentence: str) -> Float32[np.ndarray, "1 feat"]:
        encoding = self._tokenizer.encode(sentence)
        ids = np.array([encoding.ids], dtype=np.int64)
        feed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        (tokens, *_) = self._session.run(None, {name: feed[name] for name in self._inputs})
        mean = np.asarray(tokens, dtype=np.float32).mean(axis=1)
        return mean / np.linalg.norm(mean, axis=-1, keepdims=True)
