"""The report as a single HTML file that needs no network and no other file."""

from html import escape

from f3rm_ext.html.content import ReportContent, plural
from f3rm_ext.html.gallery import query_section, views_section
from f3rm_ext.html.tables import (
    coverage_section,
    curves_section,
    facts_section,
    key_figures,
    metrics_section,
    time_section,
)


def build_page(content: ReportContent) -> str:
    """Returns the page.

    Args:
        content: what the page says. Its texts are escaped; missing pictures are left out.
    """
    sections = [
        views_section(content),
        query_section(content),
        metrics_section(content),
        coverage_section(content),
        curves_section(content),
        time_section(content),
        facts_section(content),
    ]
    return html_page(
        content.title,
        "f3rm-ext report",
        f'<p class="lead">{escape(lead(content))}</p>{key_figures(content)}{"".join(sections)}',
        "This page is a single file and loads nothing from elsewhere. The trained model rendered its "
        "pictures; photos and exact depth come from the capture.",
        _SCRIPT,
    )


def html_page(title: str, eyebrow: str, body: str, footer: str, script: str = "", style: str = "") -> str:
    """Returns a page in the project's look, as a single file.

    Args:
        title: headline, plain text.
        eyebrow: small line above it, plain text.
        body: HTML below it.
        footer: last line, plain text.
        script: JavaScript to run at the end.
        style: CSS beside the project's.
    """
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_CSS}{style}</style></head><body><main>"
        f'<p class="eyebrow">{escape(eyebrow)}</p><h1>{escape(title)}</h1>{body}'
        f"<footer>{escape(footer)}</footer></main>"
        f"{f'<script>{script}</script>' if script else ''}</body></html>\n"
    )


def lead(content: ReportContent) -> str:
    """Returns the opening paragraph: what was trained and what the page shows."""
    measured = content.measured
    train, held = measured.get("train_images", 0), measured.get("eval_images", 0)
    what = "a synthetic, ray-traced room" if content.synthetic else content.data_name
    extractors = ", ".join(measured.get("heads", {}).values())
    trained = "A radiance field was" if content.is_field else "Gaussian splats were"
    text = (
        f"{trained} trained on {plural(train, 'photo')} of {what} in {measured.get('steps', 0)} steps; "
        f"{plural(held, 'other photo')} {'was' if held == 1 else 'were'} held out to evaluate it."
    )
    if extractors:
        learned = "it has learned the" if content.is_field else "they carry the"
        text += (
            f" Beside colour and depth {learned} 2D features of {extractors}, which can be queried: "
            "a piece of one photo shows what to look for, and the same 3D scene finds it in every view."
        )
    return text


_CSS = """
:root{--ink:#17202a;--soft:#5b6875;--paper:#fbfaf8;--card:#fff;--line:#e4e1dc;--accent:#0f766e;--warm:#b45309;
--shade:0 1px 2px rgba(20,25,30,.05),0 6px 24px rgba(20,25,30,.06);color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--ink:#e8eaec;--soft:#9aa6b2;--paper:#111417;--card:#191d21;--line:#2b3138;
--accent:#4fd1c0;--warm:#f0a559;--shade:none}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.6 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;-webkit-text-size-adjust:100%}
main{max-width:1120px;margin:0 auto;padding:48px 24px 64px}
h1{font-size:clamp(1.9rem,5vw,2.9rem);line-height:1.12;letter-spacing:-.025em;margin:0 0 14px;font-weight:680}
h2{font-size:1.4rem;letter-spacing:-.012em;margin:64px 0 6px;font-weight:650}
h3{font-size:1rem;margin:28px 0 6px;font-weight:620}
p{margin:0 0 14px;max-width:72ch}
.eyebrow{color:var(--accent);font-weight:640;font-size:.8rem;letter-spacing:.08em;text-transform:uppercase;
margin:0 0 10px}
.lead{font-size:1.12rem;color:var(--soft)}.soft{color:var(--soft)}.small{font-size:.875rem}
.keys{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:30px 0 0}
.key,.card{background:var(--card);border:1px solid var(--line);border-radius:14px;box-shadow:var(--shade)}
.key{padding:14px 18px}.key b{display:block;font-size:1.6rem;line-height:1.25;letter-spacing:-.02em;font-weight:650;
font-variant-numeric:tabular-nums}.key span{color:var(--soft);font-size:.84rem;line-height:1.35;display:block}
.card{padding:20px;margin:16px 0;min-width:0}
figure{margin:0;min-width:0}figcaption{color:var(--soft);font-size:.84rem;line-height:1.4;padding-top:6px}
img{display:block;width:100%;height:auto;border-radius:8px;background:var(--line)}
.strip{display:grid;grid-template-columns:repeat(4,1fr);gap:10px;margin:0 0 16px}
.strip.three{grid-template-columns:repeat(3,1fr)}
.compare{position:relative;overflow:hidden;border-radius:10px;touch-action:pan-y;--cut:50%;cursor:ew-resize;
background:var(--line)}
.compare img{border-radius:0;user-select:none;-webkit-user-drag:none}
.compare .over{position:absolute;inset:0;clip-path:inset(0 calc(100% - var(--cut)) 0 0)}
.compare .over img{width:100%;height:100%}
.compare::after{content:"";position:absolute;top:0;bottom:0;left:var(--cut);width:2px;margin-left:-1px;
background:#fff;box-shadow:0 0 0 1px rgba(0,0,0,.35)}
.compare input{position:absolute;inset:0;width:100%;height:100%;margin:0;opacity:0;cursor:ew-resize;z-index:3}
.compare:focus-within{outline:3px solid var(--accent);outline-offset:2px}
.tag{position:absolute;bottom:10px;padding:2px 10px;border-radius:99px;background:rgba(10,12,14,.66);color:#fff;
font-size:.8rem;z-index:2;pointer-events:none}.tag.l{left:10px}.tag.r{right:10px}
.stage{display:grid;grid-template-columns:minmax(0,1fr) 132px;gap:14px}
.thumbs{display:grid;gap:8px;align-content:start}
.thumbs button{padding:0;border:2px solid transparent;border-radius:10px;background:none;cursor:pointer;line-height:0}
.thumbs button[aria-pressed=true]{border-color:var(--accent)}
.modes{display:flex;flex-wrap:wrap;gap:8px;margin:0 0 12px}
.modes button{font:inherit;font-size:.9rem;padding:5px 14px;border-radius:99px;border:1px solid var(--line);
background:var(--card);color:var(--ink);cursor:pointer}
.modes button[aria-pressed=true]{background:var(--accent);border-color:var(--accent);color:var(--card);font-weight:600}
.ask{max-width:860px;display:grid;grid-template-columns:minmax(0,2fr) minmax(0,1fr);gap:18px;align-items:start}
.legend{display:flex;align-items:center;gap:10px;font-size:.84rem;color:var(--soft);margin:10px 0 18px;flex-wrap:wrap}
.legend i{display:block;height:10px;width:180px;border-radius:5px}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.94rem}
th,td{text-align:left;padding:9px 14px 9px 0;border-bottom:1px solid var(--line);vertical-align:top}
tr:last-child td{border-bottom:0}.named td:first-child{min-width:150px}td.n,th.n{padding-left:8px}
th{font-size:.8rem;color:var(--soft);font-weight:600}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}td.n b{font-weight:650}
.two{display:grid;grid-template-columns:1fr 1fr;gap:16px}.two>.card{margin:16px 0 0}
svg{display:block;width:100%;height:auto;overflow:visible}svg text{fill:var(--soft);font-size:13px;font-family:inherit}
.grid{stroke:var(--line);stroke-width:1}.curve{fill:none;stroke:var(--accent);stroke-width:2.5;stroke-linejoin:round}
.dot,.bar{fill:var(--accent)}.bar:hover{fill:var(--warm)}
.time{display:flex;height:26px;border-radius:8px;overflow:hidden;gap:2px;margin:4px 0 14px}
.time i{display:block;min-width:3px;background:var(--accent)}.time i:nth-child(even){opacity:.62}
pre{margin:10px 0 0;padding:14px 16px;border-radius:10px;background:#14181c;color:#e6e9ec;font:13px/1.6 ui-monospace,
SFMono-Regular,Menlo,Consolas,monospace;white-space:pre-wrap;overflow-wrap:anywhere}pre+pre{margin-top:8px}
code{font:.9em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
summary{cursor:pointer;color:var(--accent);font-weight:600;font-size:.94rem;padding:4px 0}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 20px;margin:0;font-size:.94rem}dt{color:var(--soft)}
dd{margin:0;overflow-wrap:anywhere}footer{margin-top:56px;color:var(--soft);font-size:.84rem}
@media(max-width:760px){main{padding:28px 16px 48px}h2{margin-top:48px}
.strip,.strip.three{grid-template-columns:1fr 1fr}
.stage{grid-template-columns:1fr}.thumbs{grid-template-columns:repeat(5,1fr)}.ask,.two{grid-template-columns:1fr}
.ask .crop{max-width:180px}.card{padding:14px}.key{padding:12px 14px}.key b{font-size:1.35rem}
.named,.named tbody{display:block}.named tr{display:grid;grid-template-columns:1fr auto}
.named td{border:0;padding:3px 0}
.named tr{border-bottom:1px solid var(--line);padding:7px 0}.named td:nth-child(3){grid-column:1/-1}
.named th:nth-child(3){display:none}.hide{display:none}th,td{padding-right:10px}}
@media print{.modes,.thumbs{display:none}.card,.key{box-shadow:none;break-inside:avoid}}
"""

_SCRIPT = """
document.querySelectorAll('.hero').forEach(function(hero){
  var compare=hero.querySelector('.compare'),over=compare.querySelector('.over img'),
      under=compare.querySelector('.under'),left=compare.querySelector('.l'),right=compare.querySelector('.r'),
      range=compare.querySelector('input'),views=hero.querySelectorAll('.thumbs button'),
      modes=hero.querySelectorAll('.modes button'),view='0',mode=modes[0];
  function picture(name){return document.querySelector('[data-picture="'+view+'-'+name+'"]')}
  function press(all,one){all.forEach(function(b){b.setAttribute('aria-pressed',b===one)})}
  function show(){
    var a=picture(mode.dataset.left),b=picture(mode.dataset.right);
    if(a)over.src=a.src;if(b)under.src=b.src;
    left.textContent=mode.dataset.leftName;right.textContent=mode.dataset.rightName;
  }
  range.addEventListener('input',function(){compare.style.setProperty('--cut',range.value+'%')});
  compare.addEventListener('pointermove',function(e){
    if(e.pointerType!=='mouse')return;var box=compare.getBoundingClientRect();
    range.value=100*(e.clientX-box.left)/box.width;compare.style.setProperty('--cut',range.value+'%');
  });
  views.forEach(function(b){b.addEventListener('click',function(){view=b.dataset.view;press(views,b);show()})});
  modes.forEach(function(b){b.addEventListener('click',function(){mode=b;press(modes,b);show()})});
});
"""
