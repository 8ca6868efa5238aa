"""Values in place of those that are missing or wrong, so that the other settings can be checked all the same. Nothing here imports torch."""

from collections.abc import Callable, Collection, Iterable, Mapping

from domino_lm.config.schema import NO_DEFAULT, settings
from domino_lm.config.settings import RunConfig

FITTING: Mapping[str, tuple[int | float, int | float]] = {
    "num_layers": (8, 16),
    "hidden_size": (4096, 8192),
    "num_attention_heads": (32, 64),
    "seq_length": (1024, 2048),
    "micro_batch_size": (1, 2),
    "lr": (1.0, 2.0),
}
"""Two values of each setting that has no default, with which most others go together."""


def faults_beside(
    at_fault: Collection[str],
    values: Mapping[str, object],
    run_of: Callable[[dict[str, object]], RunConfig],
    faults_of: Callable[[RunConfig], Iterable[str]],
) -> list[str]:
    """Faults of the run that ``run_of`` makes of ``values`` that have nothing to do with the settings ``at_fault``.

    Those get values that fit, or their defaults. A fault that names one of them, or that changes with the value, is left out.
    """
    required = {item.name for item in settings() if item.default is NO_DEFAULT}
    found = []
    for turn in (0, 1):
        sound = {name: value for name, value in values.items() if name not in at_fault}
        sound |= {name: FITTING[name][turn] for name in at_fault if name in required}
        found.append(list(faults_of(run_of(sound))))
    flags = ["--" + name.replace("_", "-") for name in at_fault]
    return [fault for fault in found[0] if fault in found[1] and not any(flag in _words(fault) for flag in flags)]


def _words(text: str) -> set[str]:
    return {word.strip(".,:;()") for word in text.split()}
