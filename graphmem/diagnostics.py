"""Diagnostics: the remarks that a reader of an estimate needs, as values.

A :class:`Diagnostic` has a :class:`Code`, which has the kind of the remark and its possible effect on the figures
(:data:`MEANINGS`, one row a code), the place it is about, and the arguments of its sentence. Sentences are made here
alone, for people; nothing in graphmem reads them.

    >>> one = Code.NOT_CHECKED.about(operator="my.kernel.default", count=2)
    >>> one.kind, one.effect.value, one.message
    ('unknown', 'more', 'not checked: outputs only assumed of my.kernel.default')
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, unique
from typing import Any

#: What the arguments of a sentence may be.
Argument = str | int | float


class Effect(Enum):
    """The possible effect of a diagnostic's reason on the levels requested, allocated, reserved and device."""

    #: Nothing: no size depends on it.
    NONE = "none"
    #: The most that there can be was counted: figures may be less, and nothing bounds by how much.
    AT_MOST = "at most"
    #: Less than there can be was counted: figures may be more, without a bound that is known.
    MORE = "more"
    #: A cause of its own bounds it, which is found in the trace.
    INTERVAL = "interval"
    #: Figures may be less or more, without a bound that is known.
    UNBOUNDED = "unbounded"


@dataclass(frozen=True, slots=True)
class Meaning:
    """A row of :data:`MEANINGS`. ``kind``: see :class:`Diagnostic`; ``cause``: the name of the cause of doubt that all
    diagnostics with this name share; ``words``: the sentence, with ``{place}`` and arguments by name. ``any_size``: a
    number of data becomes a size, or something was not seen, so that no room is ever enough."""

    kind: str
    effect: Effect
    words: str
    cause: str = ""
    any_size: bool = False


#: Names of causes of doubt, in the order of reports.
OPERATORS, INSIDE, MOST = "operators not checked", "memory inside operators", "assumed to be the most"
CUT_SHORT, VALUES, ASSUMPTIONS = "a run that ended early", "values assumed", "assumptions"
NOT_SEEN = "batches and runs that were not followed"
DIFFERING = "steps that differ"
#: What removes such a doubt, where one thing does for all of its diagnostics.
REMEDIES = {
    OPERATORS: "graphmem verify measures it on a card",
    MOST: "--data-dependent SHARE selects fewer",
    DIFFERING: "--iterations N follows more steps",
    VALUES: "--assume FILE:LINE=VALUE names what is read",
}


def _more(words: str, cause: str) -> Meaning:
    return Meaning("unknown", Effect.MORE, words, cause)


def _at_most(words: str) -> Meaning:
    return Meaning("unknown", Effect.AT_MOST, words, MOST)


def _value(words: str, *, any_size: bool = False) -> Meaning:
    return Meaning("assumed", Effect.UNBOUNDED, f"{{place}}: {words}", VALUES, any_size)


def _unbounded(words: str) -> Meaning:
    return Meaning("unknown", Effect.UNBOUNDED, words, ASSUMPTIONS)


def _harmless(words: str, kind: str = "note") -> Meaning:
    return Meaning(kind, Effect.NONE, words)


_MEMORY = "memory inside operators is not modelled: {operator}: {memory}"
_CTC = "targets of ctc_loss were taken to be as long as they are padded to"
_NOT_NVIDIA = "{card} is no NVIDIA card: operators are assumed to take what they take on an {stands_in}; {by_maker}"


@unique
class Code(Enum):
    """The subject of a diagnostic, with its effect; its name in lower case is its name in JSON. The last four have no
    words of their own: they are for runtimes, which write the ``text`` and choose the code by its effect."""

    NOT_CHECKED = _more("not checked: outputs only assumed of {operator}", OPERATORS)
    LAYOUT_NOT_CHECKED = _more(
        "not checked: outputs only assumed of {operator} for inputs that are not contiguous", OPERATORS
    )
    NOT_MODELLED = _more(_MEMORY, INSIDE)
    ESTIMATED = Meaning("unknown", Effect.INTERVAL, _MEMORY)
    WORKING_BUFFERS = _more("working buffers of {operator}", INSIDE)
    SPARSE_INDICES = _at_most("indices of sparse gradients were assumed to be distinct, where equal ones are added up")
    ALL_SELECTED = _at_most("nonzero, boolean masks and unique were assumed to select 100% of the candidates")
    CTC_TARGETS = _at_most(_CTC)
    MATRIX_EXPONENTIAL = _at_most("matrix_exp was taken to need its highest degree, 18, which the norms decide")
    NOTHING_PADDED = _at_most("a padding mask of unknown values was taken to pad nothing")
    GENERATION_GOES_ON = _at_most("generation goes on to its largest length: no token was taken to end its sequence")
    LBFGS_GOES_ON = _at_most("steps of L-BFGS went on: every evaluation lowered the loss and entered the history")
    FLEX_TRACED = _at_most(
        "flex_attention without compilation: numbers of a few bytes that tracing its functions makes were counted"
    )
    GRADIENT_OF_PROD = _at_most(
        "the gradient of prod was taken to go the way of inputs with zeros; without any, a card takes less"
    )
    GRADIENT_OF_FILL = _at_most(
        "the gradient of a fill value was taken to hold the whole tensor; a card holds what the mask selects"
    )
    PROGRAM_FAILED = Meaning(
        "headline", Effect.MORE, "{ending}; the figures are of what it did until then", CUT_SHORT, any_size=True
    )
    NOT_FOLLOWED = Meaning(
        "headline",
        Effect.MORE,
        "{ending}; it needs at least what it did until then, and whether it fits is not known",
        CUT_SHORT,
        any_size=True,
    )
    RUN_ENDS = Meaning(
        "headline",
        Effect.MORE,
        "the run ends where it is refused memory; the figures are of what it took until then",
        CUT_SHORT,
        any_size=True,
    )
    RUNS_SKIPPED = _more(
        "{place} is a list of runs, of which {followed} were followed and others, which may need more, were not",
        NOT_SEEN,
    )
    PROGRAM_LEFT = _more("{ending}; it may take more", NOT_SEEN)
    EPOCH_VARIES = _more(
        "{read} batches of {place} were read, the largest of them analysed; sizes differ, and those that were not read "
        "may be larger (--epoch all reads on)",
        NOT_SEEN,
    )
    RECORDING_ENDS = Meaning(
        "headline",
        Effect.MORE,
        "the recorded run died of its last request: it needs at least this, and what came after is not recorded",
        CUT_SHORT,
        any_size=True,
    )
    STEPS_DIFFER = _more(
        "{place} was left after {steps} optimizer steps, and its last ones took other memory than each other; later "
        "ones may take more (--iterations N follows N)",
        DIFFERING,
    )
    STEPS_KEEP = _more(
        "{place} was left after {steps} optimizer steps, and each keeps {kept} on the card that the next does not give "
        "back; later ones add to it (--iterations N follows N)",
        DIFFERING,
    )
    ANSWERED_YES = _value("a question about values is answered with yes")
    ANSWERED_NO = _value("a question about values is answered with no")
    WHOLE_NUMBER = _value("a whole number is taken to be 1", any_size=True)
    NUMBER = _value("a number is taken to be 1", any_size=True)
    # Floating-point numbers as plain floats or in an array: metrics, pictures. What becomes of them is not followed; a
    # size is rare.
    NUMBERS = _value("a number is taken to be 1")
    NUMBER_DECIDES_BRANCH = _value("a number is taken to be 1; it decides a branch")
    NUMBER_DECIDES_SIZE = _value("a number is taken to be 1; it decides a whole number", any_size=True)
    DRAWN = _value("a random number of the card, or what it decides, is a possible draw")
    TAKES_ALL = _value("{what} takes all of {candidates:,}")
    SHARE_SELECTED = _unbounded(
        "nonzero, boolean masks and unique were assumed to select {share:.0%} of the candidates"
    )
    DRAFTS_CONFIDENT = _unbounded(
        "every draft was taken to be as long as its schedule lets it be: the model that drafts is confident"
    )
    DRAFTS_RIGHT = _unbounded("every drafted token was taken to be right")
    DRAFTS_ACCEPTED = _unbounded("of every draft as many tokens were taken to be right as --accepted says")
    TOKENS_ALLOWED = _unbounded("no token that the text says next was taken to be forbidden")
    QUANTIZER_FITTED = _unbounded("hqq's search for a quantisation was taken to run to its last iteration")
    NO_OUTLIERS = _more(
        "no activation was taken to exceed the threshold of LLM.int8(), so none is multiplied in 16 bits", ASSUMPTIONS
    )
    AUTOTUNING_LEFT_OUT = _unbounded(
        "torch.compile: max-autotune chooses kernels by timing on the card; the choices of mode default are assumed"
    )
    PADDING_NOT_TIMED = _unbounded(
        "torch.compile: matrix products with unaligned sides, which are padded where that is faster on the card; "
        "assumed not to be"
    )
    SCRIPT_AS_PYTHON = _unbounded(
        "TorchScript that asks tensors for their device was run as the Python that it is made of (as with "
        "PYTORCH_JIT=0): on a card its own derivatives keep other tensors, less or more"
    )
    SCRIPT_UNFUSED = _unbounded(
        "a part of TorchScript was run without its fuser, which on a card joins element-wise operators from the second "
        "run on: their results are there at once then, and what they kept between them is not"
    )
    SCRIPT_CONVOLUTIONS = _unbounded(
        "torch.jit.optimize_for_inference joins convolutions with what follows them in cuDNN on a card; here they are "
        "apart, with the workspaces that they have so"
    )
    NAME_GONE = _unbounded("{path} is gone from this PyTorch: {lost}")
    TRITON_MISSING = _unbounded(
        "{importer} imports triton, which is not installed here, and goes on without it; install it (triton needs no "
        "card) to analyse the path of a card"
    )
    PACKAGE_MISSING = _unbounded(
        "{importer} imports {package}, which is not installed here, and goes on without it; where it is installed it "
        "may go another way"
    )
    ONLY_LOGGED = _harmless(
        "values that are read back for logs and checks were assumed to be 1, and checks to be passed"
    )
    FINITE = _harmless("values were taken to be finite where the step checks them")
    DISTRIBUTION_VALID = _harmless("parameters and samples of torch.distributions were taken to be in range")
    ASSUMPTION_UNUSED = _harmless("--assume {place}: nothing unknown was read there")
    RUNS_ALIKE = _harmless(
        "{place} is a list of runs, of which {followed} were followed, the last of them with equal peaks"
    )
    NUMBERS_COMPUTED = _harmless(
        "{place} computes other numbers for later items; {followed} of those, the largest among them, were followed"
    )
    SHORTENED = Meaning(
        "note",
        Effect.INTERVAL,
        "several runs, or batches of many sizes, of which a few steps were followed: what the allocator has cached "
        "from other sizes may be cut up further in later ones",
    )
    EPOCH_ALIKE = _harmless("{read} batches of {place} were read, all of one shape; the others were not")
    EPOCH_READ = _harmless(
        "all {read} batches of {place} were read, of {shapes} shapes; {analysed}, the largest and others of new "
        "shapes, were analysed beside the first ones"
    )
    HOST_BUDGET = _harmless("host tensors exceeded the budget (--host-values) and have shapes only")
    HOST_DRAWS = _harmless(
        "random numbers of the host could not be counted: later ones are a possible draw, not the seed's"
    )
    TRITON_LAUNCHED = _harmless("the Triton kernel {kernel} was launched without effect")
    OPTIONAL_MISSING = _harmless(
        "{importer} imports {package}, which is not installed here, and goes on without it; the figures are of the way "
        "it takes then"
    )
    WEIGHTS_ABSENT = _harmless(
        "there are no weights in {place}: they were taken to be the parameters of its configuration"
    )
    CONFIGURATION_KNOWN = _harmless("the configuration of {place} is that of {known} in the table of public models")
    TOKENIZER_ABSENT = _value(
        "the tokenizer is not on this disk; one of {size} tokens stands for it, each of four characters", any_size=True
    )
    TOKENIZER_ASKED = _harmless(
        "the tokenizer {place} is not on this disk; one of {size} tokens stands for it (--vocab)"
    )
    DATA_SET_ASKED = _harmless(
        "the data set {place} is not on this disk; {rows} rows of {tokens} tokens stand for it (--dataset)"
    )
    WEIGHTS_OMITTED = _harmless("{size} of pickled weights were left out of files, which are that much larger")
    NOT_NVIDIA = Meaning("headline", Effect.UNBOUNDED, _NOT_NVIDIA, ASSUMPTIONS)
    VERSION_NEWER = Meaning(
        "headline",
        Effect.INTERVAL,
        "PyTorch {asked} is newer than {newest}, the newest known: the rules of {newest} are applied",
    )
    OTHER_COMPILER = Meaning(
        "headline",
        Effect.UNBOUNDED,
        "compiled by PyTorch {installed}, which is installed: what {asked}'s compiler fuses and saves instead is not "
        "known; install {asked} for its own",
        ASSUMPTIONS,
    )
    RANK_FAILED = _harmless("rank {rank}: {ending}", "headline")
    RANK_FULLEST = _harmless(
        "rank {rank} holds the most of {ranks}, {more} more than rank {first}; the figures are its", "headline"
    )
    RANKS_CUT = _harmless("more than {most} processes differ, and only so many were analysed", "headline")
    CUDNN_NO_PLAN = Meaning(
        "warning", Effect.INTERVAL, "convolutions that cuDNN did not plan and the built-in model did: {reason}"
    )
    CUDNN_NO_SPACES = Meaning(
        "warning",
        Effect.INTERVAL,
        "recurrent networks of which cuDNN did not tell the spaces and the built-in model did: {reason}",
    )
    REFUSED = _harmless("torch.OutOfMemoryError was raised {times}: {place} ({operator}) asked for {asked}")
    LATER_PLAN = _harmless(
        "cuDNN runs convolutions of this shape with a later plan, because the first one's workspace does not fit"
    )
    PLANS_PREDICTED = Meaning(
        "note",
        Effect.INTERVAL,
        "workspaces of convolutions are predicted, the largest of {largest}, {share:.0%} of the reserved peak; with "
        "graphmem[cudnn] installed cuDNN tells them itself",
    )
    STEP_FAILS = _harmless(
        "{tokens} tokens are more than the table of {positions} positions of the model: this step fails on a card",
        "headline",
    )
    NOT_DONATED = _harmless(
        "{size} of arguments come back as outputs and live twice in a call; with donate_argnums, jax.jit writes them "
        "over the old ones"
    )
    HEADLINE = _harmless("{text}", "headline")
    UNKNOWN = Meaning("unknown", Effect.UNBOUNDED, "{text}", ASSUMPTIONS, any_size=True)
    WARNING = _harmless("{text}", "warning")
    NOTE = _harmless("{text}")

    def about(self, *, place: str = "", count: int = 1, **arguments: Argument) -> Diagnostic:
        """The diagnostic of this code at a ``place`` such as ``train.py:31``, with the arguments of its sentence."""
        return Diagnostic(self, count=count, place=place, arguments=tuple(arguments.items()))


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """Something the reader must know.

    ``text`` is the sentence of a code without words of its own; ``count`` how often it happened; ``place`` the line,
    the folder or the operator it is about, "" for none; ``arguments`` the names and values in its sentence. Equal ones
    are the same remark.
    """

    code: Code
    text: str = ""
    count: int = 1
    place: str = ""
    arguments: tuple[tuple[str, Argument], ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.code, str):  # by its name in JSON
            object.__setattr__(self, "code", Code[self.code.upper()])

    def __str__(self) -> str:
        return self.message

    @property
    def meaning(self) -> Meaning:
        """The row of its code."""
        return MEANINGS[self.code]

    @property
    def kind(self) -> str:
        """``headline`` (stands beside the verdict), ``assumed`` (a line's value that decides a size or a branch),
        ``unknown`` (counted, not modelled), ``warning`` or ``note``."""
        return self.meaning.kind

    @property
    def effect(self) -> Effect:
        """The possible effect on the figures."""
        return self.meaning.effect

    @property
    def message(self) -> str:
        """The sentence, without an end."""
        place = self.place or "a line that is not known"
        return self.meaning.words.format(**dict(self.arguments), place=place, text=self.text)

    def counted(self, count: int) -> Diagnostic:
        """The same, ``count`` times."""
        return replace(self, count=count)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "code": self.code.name.lower(),
            "kind": self.kind,
            "effect": self.effect.value,
            "place": self.place,
            "message": self.message,
            "count": self.count,
        }


def counted(found: Mapping[Diagnostic, int]) -> list[Diagnostic]:
    """Diagnostics with how often each happened."""
    return [one.counted(count) for one, count in found.items()]


#: What each code means.
MEANINGS = {code: code.value for code in Code}
