"""Renders the conda recipe as rattler-build would, and says what is wrong with it.

It needs no channel: packages are not resolved, and nothing is built.
"""

from pathlib import Path

from rattler_build import PlatformConfig, RenderConfig, Stage0Recipe, VariantConfig

FOLDER = Path(__file__).resolve().parents[1] / "packaging" / "conda"


def main() -> None:
    recipe = Stage0Recipe.from_file(FOLDER / "recipe.yaml")
    variants = VariantConfig.from_file(FOLDER / "variants.yaml")
    for platform in ("linux-64", "linux-aarch64"):
        config = RenderConfig(PlatformConfig(target_platform=platform))
        rendered = [one.recipe.to_dict() for one in recipe.render(variants, config)]
        if len(rendered) != 1:
            raise SystemExit(f"{FOLDER}: expected one package for {platform}, got {len(rendered)}")
        tools = rendered[0]["requirements"]["build"]
        for tool in (f"gxx_{platform}", f"sysroot_{platform} 2.28.*"):
            if tool not in tools:
                raise SystemExit(f"{FOLDER}: expected {tool} for {platform}, got {tools}")


if __name__ == "__main__":
    main()
