"""Models, configurations and tokenizers that a program names as on the Hugging Face Hub, and that are not on this disk.

The configuration is that of ``hf:NAME``: what a download left in the cache, else the table of public models
(:mod:`graphmem.sources.hub`), without a network and at once. A tokenizer that is not there is one of the same number of
tokens that cuts text in pieces of four characters (a usual mean of English text); which they are decides no size.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from graphmem.capture.device.watched_imports import patched_imports
from graphmem.capture.patches import Patches
from graphmem.diagnostics import Code, Diagnostic
from graphmem.sources import hub

_HUB, TOKENIZERS = "transformers.utils.hub", "transformers.models.auto.tokenization_auto"
_CONFIGURATION = "config.json"
#: Characters of a token.
_CHARACTERS = 4
_SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")


@contextlib.contextmanager
def hub_names(remark: Callable[[Diagnostic], None]) -> Iterator[dict[str, str]]:
    """Until the end transformers finds the public models that it is asked for by name. The yielded dictionary has the
    names that were asked for, with the folders that hold their configurations."""
    with tempfile.TemporaryDirectory(prefix="graphmem-hub-") as place:
        names = _Names(Path(place), remark)
        with patched_imports({_HUB: names.patch_files, TOKENIZERS: names.patch_tokenizers}):
            yield names.folders


class _Names:
    def __init__(self, place: Path, remark: Callable[[Diagnostic], None]) -> None:
        self._place, self._remark = place, remark
        self.folders: dict[str, str] = {}

    def patch_files(self, patches: Patches, module: ModuleType) -> None:
        """``cached_files`` (transformers/utils/hub.py, 5.x) finds the configurations of known names."""
        find = module.cached_files

        def found(path_or_repo_id: Any, filenames: Sequence[str], *args: object, **kwargs: object) -> Any:
            folder = self._folder(str(path_or_repo_id)) if _CONFIGURATION in filenames else None
            if folder is None:
                return find(path_or_repo_id, filenames, *args, **kwargs)
            return [os.path.join(folder, _CONFIGURATION)]

        patches.set(module, "cached_files", found)

    def patch_tokenizers(self, patches: Patches, module: ModuleType) -> None:
        """``AutoTokenizer.from_pretrained`` gives a stand-in for a tokenizer that is not there."""
        load = module.AutoTokenizer.from_pretrained

        def loaded(name: Any, *args: object, **kwargs: object) -> Any:
            found, size = None, self._vocabulary(name)
            try:
                found = load(name, *args, **kwargs)
            except (OSError, ValueError):
                if size is None:
                    raise
            if size is None or (found is not None and found.vocab_size > len(_SPECIAL)):
                return found  # fewer tokens are made of a configuration alone
            self._remark(Code.TOKENIZER_ABSENT.about(place=str(name), size=size))
            return stand_in(size, str(name))

        patches.set(module.AutoTokenizer, "from_pretrained", staticmethod(loaded))

    def _folder(self, name: str) -> str | None:
        """The folder of a configuration that only the table of public models has."""
        if os.path.isdir(name) or hub.cached_configuration(name) is not None:
            return None
        known = hub.known_model(name)
        if known is None:
            return None
        folder = self._place / known.replace("/", "--")
        if name not in self.folders:
            folder.mkdir(exist_ok=True)
            (folder / _CONFIGURATION).write_text(json.dumps(hub.known_models()[known]), encoding="utf-8")
            self._remark(Code.CONFIGURATION_KNOWN.about(place=name, known=known))
            self.folders[name] = str(folder)
        return self.folders[name]

    def _vocabulary(self, name: Any) -> int | None:
        """The number of tokens by the configuration beside a tokenizer; None where there is none."""
        path = Path(str(name), _CONFIGURATION)
        if not path.is_file():
            cached, folder = hub.cached_configuration(str(name)), self._folder(str(name))
            path = cached or Path(folder or "", _CONFIGURATION)
        with contextlib.suppress(OSError, ValueError):
            given = json.loads(path.read_text(encoding="utf-8"))
            size = given.get("vocab_size", given.get("text_config", {}).get("vocab_size"))
            return size if isinstance(size, int) and size > len(_SPECIAL) else None
        return None


def stand_in(size: int, name: str) -> Any:
    """A tokenizer of ``size`` tokens, each of four characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(_SPECIAL)}
    words |= {f"<{number}>": number for number in range(len(_SPECIAL), size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=_SPECIAL[0]))
    pieces = Regex(rf"[\s\S]{{1,{_CHARACTERS}}}")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pieces, "isolated")
    tokenizer.decoder = decoders.Fuse()
    unknown, begin, end, pad = _SPECIAL
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=unknown, bos_token=begin, eos_token=end, pad_token=pad
    )
    made.name_or_path = name
    made.chat_template = (
        "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
    )
    return made
