"""Check and read the file of `--inputs`: tensors, or a text for the tokenizer of the base."""

from __future__ import annotations

import re
from pathlib import Path

from consistency.case.checkpoint import read_header
from consistency.case.recognition import has_tokenizer
from consistency.errors import InputError


def check_inputs_file(text: str, base: Path | None) -> str:
    """Return the full path of the inputs file of a base, after a check that it can be used.

    Raises
    ------
    InputError
        It is missing, of another kind, or empty, or it is a text and the base has no tokenizer.
    """
    path = Path(text).expanduser()
    if not path.is_file():
        raise InputError("no such inputs file", where=path)
    if path.suffix == ".txt":
        if not paragraphs(path):
            raise InputError("the inputs file holds no text", where=path)
        if base is None or not has_tokenizer(base):
            raise InputError(
                "the base has no tokenizer for a text",
                where=base or "--base",
                got=f"--inputs {path}",
                wanted="tokenizer.json, tokenizer.model or vocab.txt beside its weights",
                hint="copy them there, or give --inputs FILE.safetensors",
            )
    elif path.suffix != ".safetensors":
        raise InputError(
            "inputs are a safetensors file with the model's keyword arguments, or a text",
            where=path,
            got=path.suffix or "no ending",
            wanted=".safetensors with input_ids, attention_mask, …, or .txt in UTF-8",
        )
    elif not read_header(path):
        raise InputError("the inputs file holds no tensor", where=path)
    return str(path.resolve())


def paragraphs(path: Path) -> list[str]:
    """Return the paragraphs of a text file, or its lines where there is no blank one.

    Raises
    ------
    InputError
        It cannot be read, or is not UTF-8.
    """
    try:
        text = path.read_text(encoding="utf-8-sig").strip()
    except OSError as error:
        raise InputError("cannot read the inputs file", where=path, got=error) from None
    except UnicodeDecodeError as error:
        raise InputError("the inputs file is not UTF-8", where=path, got=error) from None
    blocks = re.split(r"\n(?:[ \t]*\n)+", text)
    return blocks if len(blocks) > 1 else text.splitlines()
