"""`flashbench config schema|show|init`: the grammar for editors, the file as it is understood, and a file to start from."""

from __future__ import annotations

import sys
from importlib import resources
from io import StringIO
from pathlib import Path
from typing import Annotated

import typer

from flashbench.errors import UsageError

TEMPLATE = "template.yaml"


def register(app: typer.Typer) -> None:
    config = typer.Typer(
        no_args_is_help=True, help="Configuration files: their JSON Schema, what one means, a template."
    )
    config.command("schema")(schema)
    config.command("show")(show)
    config.command("init")(init)
    app.add_typer(config, name="config")


def schema() -> None:
    """JSON Schema of a configuration file, for completion and checking in an editor."""
    import json

    from flashbench.config.schema import json_schema

    typer.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))


def show(
    config: Annotated[Path, typer.Argument(help="YAML file.")],
    cases: Annotated[bool, typer.Option("--cases", help="The keys of its cases instead, one a line.")] = False,
) -> None:
    """The file as it is understood: base files merged, every default written out; or the cases that it asks for."""
    from ruamel.yaml import YAML

    from flashbench.config.axes import expand
    from flashbench.config.load import load
    from flashbench.providers.table import known_names

    found = load(config)
    expansion = expand(found, known_names())
    for note in expansion.notes:
        print(f"note: {note}", file=sys.stderr)
    if cases:
        for case in expansion.cases:
            typer.echo(case.key)
        return
    yaml = YAML(typ="safe")
    yaml.default_flow_style = None
    yaml.width = 120
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    text = StringIO()
    yaml.dump(found.resolved(), text)
    typer.echo(text.getvalue(), nl=False)
    print(f"{len(expansion.cases)} cases", file=sys.stderr)


def init(
    path: Annotated[Path | None, typer.Argument(help="File to write; without one, the template is printed.")] = None,
) -> None:
    """A commented configuration to start from."""
    text = resources.files("flashbench.config").joinpath(TEMPLATE).read_text(encoding="utf-8")
    if path is None:
        typer.echo(text, nl=False)
        return
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"'{path}' is there already, and is left as it is; name another file") from None
    except OSError as error:
        raise UsageError(f"cannot write '{path}' ({error.strerror})") from None
    print(f"next: flashbench sweep {path} --dry-run", file=sys.stderr)
