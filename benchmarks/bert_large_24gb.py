"""The page docs/bert-large-24gb.md: the classic scenario of activation checkpointing, worked out by `autoremat.advise`.

    python benchmarks/bert_large_24gb.py [--preset bert-large] [--batch 16] [--seq 1024] [--target rtx3090-24g]

BERT-large with 24 layers, sequence 1,024, batch 16, AdamW, on a card with 24 GB. Everything on the page is predicted;
no GPU is involved. Writes the page and its picture.
"""

import argparse
import time
from pathlib import Path

import autoremat as ar
from autoremat._advice_figure import save_advice_figure
from autoremat._advice_tables import ADVICE_COLUMNS, advice_cells, advice_lines, cause_cells
from autoremat._loader import builder
from autoremat._units import format_bytes, format_percent

PAGE = """# {title}

{about}, batch {batch}{tokens}, AdamW, on {target} ({budget} for a training step).
Everything here is predicted from traces, without a GPU: peaks are allocated bytes, so leave the allocator some room;
times come from the vendor's figures, within an assumed {error}, their ratios nearer; matrix products of smaller
micro-batches are as fast in them as those of larger ones. Made by `python {command}`.

## What to do

{lines}

## The ways to train it

{table}

{sizes}

![Time for a sample against peak memory]({picture})

## What the peaks are made of, and what there is to do

{causes}
"""
SIZES = """Largest batch: most samples in one forward, at this sequence length. Longest sequence: most tokens in a
sample, at the micro-batch of the row, in steps of 32. Each was traced at that size, or lies between sizes at which
traces agree to the byte with how bytes grow. "Same bits" is what `autoremat verify` checks on a real run."""


def markdown(names, rows):
    lines = [" | ".join(names), " | ".join("---" for _ in names), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)


def page(advice, options, about, picture):
    budget = format_bytes(advice.budget_bytes)
    command = f"benchmarks/{Path(__file__).name}"
    causes = cause_cells(advice)
    return PAGE.format(
        title=f"{options.preset} in {budget.split('.')[0]} GiB" if options.title is None else options.title,
        about=about,
        batch=advice.batch,
        tokens=f" x {advice.tokens} tokens" if advice.tokens else "",
        target=advice.target,
        budget=budget,
        error=format_percent(advice.time_error),
        command=command,
        lines="\n\n".join(advice_lines(advice)),
        table=markdown(ADVICE_COLUMNS, advice_cells(advice)),
        sizes=SIZES,
        picture=picture,
        causes=markdown(*causes),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="bert-large")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--target", default="rtx3090-24g")
    parser.add_argument("--title", default=None)
    parser.add_argument("--name", default="bert-large-24gb")
    parser.add_argument("--no-sizes", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs")
    options = parser.parse_args()
    start = time.perf_counter()
    built = ar.build_preset(options.preset, batch=options.batch, seq=options.seq)
    advice = ar.advise(
        built.model,
        built.batch,
        target=options.target,
        sizes=not options.no_sizes,
        build=builder(options.preset),
        progress=lambda label, _: print(label, flush=True),
    )
    from autoremat._presets import preset_about

    picture = f"{options.name}.svg"
    save_advice_figure(advice, options.out / picture)
    text = page(advice, options, preset_about(options.preset), picture)
    (options.out / f"{options.name}.md").write_text(text, encoding="utf-8")
    print(f"worked out in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
