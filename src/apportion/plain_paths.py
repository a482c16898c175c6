"""Fast paths, and how they are switched off."""

ALL: tuple[str, ...] = ("fused", "linear", "pages")
