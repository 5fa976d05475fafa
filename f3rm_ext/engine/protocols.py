"""What the parts of a run may implement for the trainer and the pipeline, which do without what a part lacks.

Options of a model:      :class:`FitsTrainer`, :class:`FitsOptimizers`, :class:`ChecksExport`.
Model:                   :class:`ShardsParameters`, :class:`GathersStatistics`, :class:`CountsLossTerms`,
                         :class:`ScalesRates`, and torch's ``get_extra_state``.
Datamanager:             :class:`HasCycle`.
Model and datamanager:   :class:`SavesMemory`, :class:`HasChoices`.
Optimiser:               :class:`GathersGradients`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.nn import Parameter

from f3rm_ext.engine.ranks import Ranks
from f3rm_ext.memory.options import MemoryOption


@runtime_checkable
class FitsTrainer(Protocol):
    """Options of a model that depend on those of the trainer, or the other way round."""

    def fit_trainer(self, trainer: Any, /) -> None:
        """Checks and adapts the options of the trainer in place, before anything is written. Called several times.

        Raises:
            ConfigError: the model cannot be trained with these options.
        """


@runtime_checkable
class FitsOptimizers(Protocol):
    """Options of a model that decide how optimisers store their state."""

    def fit_optimizers(self, optimizers: dict[str, Any], /) -> None:
        """Adapts the optimisers' configurations, by parameter group, in place."""


@runtime_checkable
class ScalesRates(Protocol):
    """A model whose learning rates depend on the scene."""

    rate_factors: Mapping[str, float]
    """Factors of the configured learning rates, by parameter group."""


@runtime_checkable
class ChecksExport(Protocol):
    """Options of a model that not every command of ns-export can export."""

    def check_export(self, command: str, argv: Sequence[str], /) -> None:
        """Raises ConfigError, with the command to use instead, where ``ns-export COMMAND`` cannot export the model."""


@runtime_checkable
class ShardsParameters(Protocol):
    """A model of which every rank may hold a part."""

    sharded: bool
    """Whether this rank has parameters of its own."""

    def collect(self, state: dict[str, Any], ranks: Ranks, /) -> None:
        """Brings the parts of all ranks into a checkpoint on rank 0. Every rank calls it."""

    def deal_out(self, state: dict[str, Any], /) -> None:
        """Keeps of a checkpoint the part of this rank."""


@runtime_checkable
class GathersStatistics(Protocol):
    """A model with statistics, beside parameters, of which every rank holds a part."""

    def gather_statistics(self) -> None:
        """Adds up over all ranks what a checkpoint holds. Every rank calls it."""


@runtime_checkable
class CountsLossTerms(Protocol):
    """A model whose losses are means over different numbers of terms on different ranks."""

    def loss_terms(
        self, losses: Mapping[str, Tensor], outputs: Mapping[str, Any], batch: Mapping[str, Any], /
    ) -> dict[str, int | Tensor]:
        """Returns the number of terms, such as rays, of each loss."""
        ...


@runtime_checkable
class HasCycle(Protocol):
    """A datamanager that goes through its images in an order."""

    def cycle_state(self) -> dict[str, Any]:
        """Returns where it is, as nested dicts, lists, numbers, strings and tensors, for the checkpoint."""
        ...

    def load_cycle_state(self, state: Mapping[str, Any], /) -> None:
        """Continues from there."""


@runtime_checkable
class HasChoices(Protocol):
    """A model or datamanager with options that may be ``auto``."""

    choices: dict[str, str | float]
    """The values that they resolve to, by name of the option."""


@runtime_checkable
class SavesMemory(Protocol):
    """A model or datamanager with options that lower the memory of training."""

    def memory_options(self) -> list[MemoryOption]:
        """Returns them, in any order."""
        ...


@runtime_checkable
class GathersGradients(Protocol):
    """An optimiser whose gradients are not all dense."""

    def gather_gradients(self, parameter: Parameter, ranks: Ranks, /) -> bool:
        """Gives a parameter the gradients of all ranks, unless they are dense.

        Every rank calls it for the same parameters, which have a gradient on at least one rank.

        Returns:
            Whether it did; False for a dense gradient.
        """
        ...
