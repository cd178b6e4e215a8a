"""The table of providers: names to specs. Importing it imports no torch."""

from __future__ import annotations

from flashbench.errors import UsageError, nearest
from flashbench.providers import fa3, flash_decode, flash_v1, flash_v2, flash_v3, gemm, naive, sdpa, tiled, user
from flashbench.providers.spec import Provider

PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for family in (naive, tiled, sdpa, flash_v2, flash_decode, flash_v3, fa3, flash_v1, gemm)
    for provider in family.PROVIDERS
}


def known_names() -> tuple[str, ...]:
    """The project's providers, and those of installed packages."""
    return (*PROVIDERS, *(name for name in user.entry_points() if name not in PROVIDERS))


def get(name: str) -> Provider:
    """The provider called `name`, or the function in a file that it names; UsageError that hints at the nearest name."""
    if name in PROVIDERS:
        return PROVIDERS[name]
    if user.is_file(name):
        return user.from_file(name)
    others = user.entry_points()
    if name in others:
        return others[name]
    known = (*PROVIDERS, *others)
    raise UsageError(f"unknown provider '{name}'{nearest(name, known)} (known: {', '.join(known)})")
