"""elle: adversarial training with one attack gradient a step, without catastrophic overfitting.

reg = elle.ELLE(eps=8/255, weight=4000)                          # ELLE-A
x_adv = elle.attacks.fgsm(model, x, y, eps=8/255)
loss = F.cross_entropy(model(x_adv), y) + reg(model, x, y)
"""

import importlib
from typing import TYPE_CHECKING, Any

from elle.version import __version__

if TYPE_CHECKING:
    from elle.core import attacks
    from elle.engine.probe import CollapseMonitor
    from elle.engine.trained import load
    from elle.evaluation.evaluate import assess, evaluate
    from elle.methods import METHODS
    from elle.plugin import ELLE

__all__ = ["ELLE", "METHODS", "CollapseMonitor", "__version__", "assess", "attacks", "evaluate", "load"]

# Resolved on first use: `import elle` and `elle --help` start at once, and the plug-in needs torch alone.
_WHERE = {
    "ELLE": "elle.plugin",
    "CollapseMonitor": "elle.engine.probe",
    "METHODS": "elle.methods",
    "assess": "elle.evaluation.evaluate",
    "attacks": "elle.core.attacks",
    "evaluate": "elle.evaluation.evaluate",
    "load": "elle.engine.trained",
}


if not TYPE_CHECKING:  # a type checker reads the imports above; this one would give it any name, misspelt ones too

    def __getattr__(name: str) -> Any:
        if name not in _WHERE:
            raise AttributeError(f"module 'elle' has no attribute {name!r}")
        module = importlib.import_module(_WHERE[name])
        return module if name == "attacks" else getattr(module, name)


def __dir__() -> list[str]:
    return __all__
