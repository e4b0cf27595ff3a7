"""What a person may say about speculation: `--speculative`, and vLLM's `speculative_config`. Checked as a whole, at
start.
"""

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

import msgspec

from tiercel.base.errors import ConfigError
from tiercel.spec.drafters.interface import Drafter

# Drafters that are models and run in the steps of their target.
OWN_METHODS: Final = ("mtp", "eagle3", "dflash", "dflash2", "dspark")
METHODS: Final = ("auto", "off", "ngram", "suffix", "custom", "draft_model", *OWN_METHODS)


class SettingsKey(NamedTuple):
    """A key of `speculative_config`: what it must be, those methods that know it (none: all), and what it does."""

    kind: type
    methods: tuple[str, ...]
    does: str


_KEYS: Final[dict[str, SettingsKey]] = {
    "method": SettingsKey(str, (), "who drafts; a drafter's own config says its method"),
    "num_speculative_tokens": SettingsKey(
        int, (), "drafts of a sequence in a step, at most: 24; 5 of a draft model; all of a drafter's block"
    ),
    "num_speculative_tokens_per_batch_size": SettingsKey(
        list, (), "[[first, last, number], ..]: at most so many beside so many sequences; 0 for none"
    ),
    "adaptive": SettingsKey(
        bool, (), "compute only drafts that pay, by measured times (true); else all that a step has room for"
    ),
    "rejection_sample_method": SettingsKey(
        str,
        ("ngram", "suffix", "custom", *OWN_METHODS),
        "which sampled drafts are accepted: those that plain decoding draws (matching), so that nothing changes; or by "
        "rejection, standard or block: the same distribution, but what comes depends on the drafts, and so on the load",
    ),
    "draft_sample_method": SettingsKey(
        str, OWN_METHODS, "drafts are drawn as the request samples (probabilistic), or the likeliest (greedy)"
    ),
    "model": SettingsKey(str, (*OWN_METHODS[1:], "draft_model"), "name or path of the drafter, or of the small model"),
    "module_path": SettingsKey(str, ("custom",), "package.module:Class of an out-of-tree drafter"),
    "options": SettingsKey(dict, ("custom",), "what that class is made with"),
    "prompt_lookup_min": SettingsKey(int, ("ngram",), "least tokens that must agree (5)"),
    "prompt_lookup_max": SettingsKey(int, ("ngram",), "most tokens that are looked up (5)"),
    "suffix_decoding_max_tree_depth": SettingsKey(int, ("suffix",), "most tokens of context that are compared (24)"),
    "suffix_decoding_max_cached_requests": SettingsKey(
        int, ("suffix",), "ended requests whose texts help others (10000); 0 for none"
    ),
    "suffix_decoding_max_spec_factor": SettingsKey(float, ("suffix",), "drafts for each token that agrees (1)"),
    "suffix_decoding_min_token_prob": SettingsKey(float, ("suffix",), "drafts whose chance is less are left out (0.1)"),
    "revision": SettingsKey(str, ("draft_model",), "of its repository"),
    "quantization": SettingsKey(str, ("draft_model",), "of its weights, as the option of this name"),
    "kv_cache_memory_bytes": SettingsKey(int, ("draft_model",), "of its own pages"),
}
KEYS: Final[Mapping[str, SettingsKey]] = MappingProxyType(_KEYS)
VERIFICATIONS: Final = ("matching", "standard", "block")
_DRAWS: Final = ("probabilistic", "greedy")
_MODEL_OPTIONS: Final = ("revision", "quantization", "kv_cache_memory_bytes")
_N_TOKENS_MAX: Final = 512
_N_TOKENS: Final = {"draft_model": 5}  # of those that differ from suffix decoding's, as each costs a pass


class SpeculationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drafted, and how many.

    method: "suffix" | "ngram"; None: nothing is speculated. is_asked: a person named it; else it is used where it can
    be. n_tokens_max: drafts of one sequence in a step. 24, vLLM's default of suffix decoding. n_tokens_by_batch: what
    that is beside so many other sequences, see `budget.n_for_batch`. is_adaptive: only what pays is computed, by what
    steps were measured to take; else always as much as there is. is_ahead: a step may be planned before drafts of the
    one before are seen; for tests of what is not adaptive. verification: of `VERIFICATIONS`, how sampled drafts are
    accepted. is_greedy: sampled requests too get the likeliest drafts. lookup: least and most tokens of an n-gram.
    suffix: what `SuffixDrafter` is told. module_path: of method "custom", "package.module:Class", a class that is a
    `spec.drafters.interface.Drafter`, made with `options`. model: of a drafter that is a model, but for a model's own
    draft head ("mtp"), its name or path; with that of "draft_model" go those of the engine's own options that
    `model_options` holds.
    """

    method: str | None = "suffix"
    is_asked: bool = False
    n_tokens_max: int = 24
    says_n_tokens: bool = False
    model: str = ""
    n_tokens_by_batch: tuple[tuple[int, int, int], ...] = ()
    is_adaptive: bool = True
    is_ahead: bool = False
    verification: str = "matching"
    is_greedy: bool = False
    lookup: tuple[int, int] = (5, 5)
    suffix: Mapping[str, Any] = {}
    module_path: str = ""
    options: Mapping[str, Any] = {}
    model_options: Mapping[str, Any] = {}

    @classmethod
    def from_options(cls, speculative: str, config: Mapping[str, Any]) -> "SpeculationSettings":
        """Build them.

        Raises: ConfigError: a key is unknown or of another method, a value out of its range, or the two contradict.
        """
        for key, value in config.items():
            _check_key(key, value)
        method = config.get("method", speculative)
        if method == "ngram_gpu" or method not in METHODS:
            raise ConfigError(
                f"speculative_config.method: got {method!r:.40}; {', '.join(METHODS)} are there; name one of them"
            )
        if speculative not in ("auto", method):
            raise ConfigError(
                f"speculative={speculative} and speculative_config.method={method}: they contradict; give one"
            )
        if method == "off":
            extra = [key for key in config if key != "method"]
            if extra:
                raise ConfigError(
                    f"speculative_config.{extra[0]}: nothing is speculated, as speculative is off; leave it out"
                )
            return cls(method=None, is_asked=True)
        is_asked, method = method != "auto", "suffix" if method == "auto" else method
        for key in config:
            if _KEYS[key].methods and method not in _KEYS[key].methods:
                raise ConfigError(
                    f"speculative_config.{key}: the method is {method}, which does not know it; leave it out"
                )
        least = config.get("prompt_lookup_min", config.get("prompt_lookup_max", 5))
        most = config.get("prompt_lookup_max", least)
        prefix = "suffix_decoding_"
        settings = cls(
            method=method,
            is_asked=is_asked,
            n_tokens_max=config.get("num_speculative_tokens", _N_TOKENS.get(method, 24)),
            says_n_tokens="num_speculative_tokens" in config,
            n_tokens_by_batch=_ranges(config.get("num_speculative_tokens_per_batch_size", [])),
            is_adaptive=config.get("adaptive", True),
            verification=_one_of("rejection_sample_method", config, VERIFICATIONS),
            is_greedy=_one_of("draft_sample_method", config, _DRAWS) == "greedy",
            lookup=(least, most),
            module_path=config.get("module_path", ""),
            options=config.get("options", {}),
            model=config.get("model", ""),
            model_options={key: config[key] for key in _MODEL_OPTIONS if key in config},
            suffix={key.removeprefix(prefix): value for key, value in config.items() if key.startswith(prefix)},
        )
        if not 1 <= settings.n_tokens_max <= _N_TOKENS_MAX:
            raise ConfigError(
                f"speculative_config.num_speculative_tokens: got {settings.n_tokens_max}; "
                f"1 to {_N_TOKENS_MAX} are needed"
            )
        for first, last, n in settings.n_tokens_by_batch:
            # What a model's draft block holds is known when it is opened.
            if n > settings.n_tokens_max and (settings.says_n_tokens or not settings.is_own):
                raise ConfigError(
                    f"speculative_config.num_speculative_tokens_per_batch_size: got {n} for {first} to {last} "
                    f"sequences; num_speculative_tokens allows {settings.n_tokens_max}; lower it, or raise that"
                )
        if settings.method == "draft_model" or settings.is_own:
            if method != "mtp" and not settings.model:
                raise ConfigError(
                    f"speculative_config.model: left out; {method} needs the name or path of a model; name it"
                )
        elif method == "custom":
            _find_class(settings.module_path)
        else:
            settings.make_drafter()  # whose limits it checks
        return settings

    @property
    def is_own(self) -> bool:
        """Whether the runner drafts, in its steps, with a model of its own."""
        return self.method in OWN_METHODS

    @property
    def draws(self) -> Literal["coupled", "apart", "likeliest"]:
        """How a drafter in the steps picks what a request samples: `drafting.hpp`'s `Draws`."""
        if self.is_greedy:
            return "likeliest"
        return "coupled" if self.verification == "matching" else "apart"

    def make_drafter(self) -> Drafter:
        """Make the drafter.

        Raises: ConfigError: one of its limits is out of range.
        """
        if self.method == "ngram":
            from tiercel.spec.drafters.ngram import NgramDrafter

            return NgramDrafter(n_min=self.lookup[0], n_max=self.lookup[1])
        if self.method == "custom":
            from tiercel.spec.drafters.guarded import GuardedDrafter

            return GuardedDrafter(_make(self.module_path, self.options))
        from tiercel.spec.drafters.suffix import SuffixDrafter

        return SuffixDrafter(**self.suffix)

    def n_rows_max(self, max_num_seqs: int) -> int:
        """Draft rows that a step needs room for: all that one sequence may have, and a few of each beside it.

        More rows than that cost as much as they bring on any processor, and each takes a row of logits.
        """
        if self.method is None:
            return 0
        n_most = 64 if self.is_adaptive or not self.is_own else 256
        n_each = 2 if self.is_adaptive or not self.is_own else self.n_tokens_max
        return max(self.n_tokens_max, min(n_each * max_num_seqs, n_most))


def _find_class(module_path: str) -> Any:
    """Import a drafter's class.

    Raises: ConfigError: there is none of this name, or it is no drafter.
    """
    where = "speculative_config.module_path"
    module_name, _, name = module_path.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{where}: got {module_path!r:.80}; package.module:Class is needed")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # a plug-in's code runs when it is imported, and may raise anything
        raise ConfigError(
            f"{where}: {module_path!r:.80} cannot be imported: {type(error).__name__}: {error}; install the package "
            "that has it into this Python, or correct the name"
        ) from error
    missing = [call for call in ("begin", "check", "close") if not callable(getattr(found, call, None))]
    if missing:
        raise ConfigError(
            f"{where}: {module_path} is no drafter: it lacks {', '.join(missing)}; see spec.drafters.interface"
        )
    return found


def _make(module_path: str, options: Mapping[str, Any]) -> Drafter:
    try:
        made: Drafter = _find_class(module_path)(**options)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"speculative_config.options: {module_path} does not take them: {error!r}; correct them"
        ) from error
    return made


def _check_key(key: str, value: object) -> None:
    if key not in _KEYS:
        raise ConfigError(f"speculative_config.{key[:40]}: unknown; known are {', '.join(KEYS)}")
    wanted = _KEYS[key].kind
    is_right = isinstance(value, (int, float) if wanted is float else wanted)
    if not is_right or (isinstance(value, bool) and wanted is not bool):
        raise ConfigError(f"speculative_config.{key}: got {value!r:.40}; {_WORDS[wanted]} is needed")


def _one_of(key: str, config: Mapping[str, Any], known: tuple[str, ...]) -> str:
    value: str = config.get(key, known[0])
    if value not in known:
        raise ConfigError(
            f"speculative_config.{key}: got {value!r:.40}; {', '.join(known)} are there; choose one of them"
        )
    return value


_WORDS: Final = {
    str: "a word",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


def _ranges(given: list[Any]) -> tuple[tuple[int, int, int], ...]:
    """Read [first, last, number] of sequences in a step and drafts of each."""
    ranges: list[tuple[int, int, int]] = []
    for one in given:
        ok = isinstance(one, list | tuple) and len(one) == 3 and all(type(n) is int for n in one)
        if not ok or one[0] > one[1] or one[2] < 0 or one[0] <= (ranges[-1][1] if ranges else 0):
            raise ConfigError(
                f"speculative_config.num_speculative_tokens_per_batch_size: got {one!r:.60}; "
                "[first, last, number] of whole numbers is needed, each range behind the one before"
            )
        ranges.append((one[0], one[1], one[2]))
    if ranges and ranges[0][0] != 1:
        raise ConfigError(
            f"speculative_config.num_speculative_tokens_per_batch_size: begins with {ranges[0][0]} sequences; "
            "1 is needed"
        )
    return tuple(ranges)
