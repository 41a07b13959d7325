#!/usr/bin/env bash
# Installs Sterna, editable, with an engine and the developer tools: install.sh VENV TOOLS ENGINE
#
# uv does it, because it can leave out packages (requirements/excluded-cpu.txt) that pip would bring
# along. Where uv is missing or too old for that, one is put into TOOLS.
set -euo pipefail

venv=$1
tools=$2
engine=$3

say() { echo "sterna: $*" >&2; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        # Run, not only looked up: version managers put names on PATH that do not work.
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
            2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    if [[ -n ${PYTHON:-} ]]; then
        say "PYTHON=$PYTHON is no Python 3.11, 3.12 or 3.13"
    else
        say "no Python 3.11, 3.12 or 3.13 on PATH; install one or name it: make PYTHON=/path/to/python3.11"
    fi
    return 1
}

version_of() { "$1" -c 'import sys; print(*sys.version_info[:2])' 2>/dev/null; }

# Whether PYTHON names another version than the environment has.
is_other_python() {
    [[ -n ${PYTHON:-} && $(version_of "$python") != "$(version_of "$venv/bin/python")" ]]
}

is_usable_uv() { "$1" pip install --help 2>/dev/null | grep -q -- --excludes; }

find_uv() {
    local python=$1
    if is_usable_uv uv; then
        command -v uv
        return
    fi
    if ! is_usable_uv "$tools/bin/uv"; then
        say "installing uv into $tools"
        # Some distributions ship Python without venv, others without pip; either will do.
        if "$python" -m venv "$tools" >/dev/null 2>&1; then
            "$tools/bin/python" -m pip install --quiet --upgrade uv >&2
        elif ! "$python" -m pip install --quiet --upgrade --target "$tools" uv >&2; then
            say "cannot install uv with $python; install uv, or Python's venv or pip package"
            return 1
        fi
    fi
    echo "$tools/bin/uv"
}

# An option of pip's, from its environment variable or its configuration files. uv reads neither,
# and people set up their indexes, proxy, certificates and wheel folders once, for pip.
pip_option() {
    local name=$1 variable
    variable=PIP_$(tr 'a-z-' 'A-Z_' <<<"$name")
    if [[ -n ${!variable:-} ]]; then
        echo "${!variable}"
    else
        "$python" -m pip config get "global.$name" 2>/dev/null ||
            "$tools/bin/python" -m pip config get "global.$name" 2>/dev/null || true
    fi
}

# Whether torch is in a wheel folder. Pages of links may have it, too, and are not read.
has_torch() {
    local link
    for link in ${links//,/ }; do
        link=${link#file://}
        if [[ $link == *://* || -f $link ]] || compgen -G "$link/torch-*.whl" >/dev/null; then
            return
        fi
    done
    return 1
}

python=$(find_python)
uv=$(find_uv "$python")

index=${UV_DEFAULT_INDEX:-$(pip_option index-url)}
if [[ -n $index ]]; then
    export UV_DEFAULT_INDEX=$index
fi
if [[ -z ${UV_INDEX:-} ]]; then
    more_indexes=$(pip_option extra-index-url | xargs)
    if [[ -n $more_indexes ]]; then
        export UV_INDEX=$more_indexes
        # As pip does; by default uv takes a package from the first index that has any version of it.
        export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match}
    fi
fi
proxy=${ALL_PROXY:-$(pip_option proxy)}
if [[ -n $proxy ]]; then
    export ALL_PROXY=$proxy
fi
insecure_hosts=${UV_INSECURE_HOST:-$(pip_option trusted-host | xargs)}
if [[ -n $insecure_hosts ]]; then
    export UV_INSECURE_HOST=$insecure_hosts
fi
certificates=${SSL_CERT_FILE:-$(pip_option cert)}
if [[ -n $certificates ]]; then
    export SSL_CERT_FILE=$certificates
fi
links=${UV_FIND_LINKS:-$(pip_option find-links | tr -s ' \n' ',')}
links=${links%,}
options=(--python "$venv/bin/python")
if [[ $engine == cpu ]]; then
    options+=(--excludes requirements/excluded-cpu.txt)
fi
if [[ -n $links ]]; then
    export UV_FIND_LINKS=$links
fi
if [[ $engine == cpu ]] && ! has_torch; then
    # The engine needs torch's CPU build, which the default index does not have.
    options+=(--torch-backend cpu)
fi

say "installing into $venv with the $engine engine"
other_engine=$(find "$venv" -maxdepth 1 -name '.installed-*' ! -name ".installed-$engine" 2>/dev/null || true)
if [[ ! -x $venv/bin/python || -n $other_engine ]] || is_other_python; then
    # Two engines in one environment would overwrite each other's files.
    "$uv" venv --quiet --clear --no-project --python "$python" "$venv"
fi
# An interrupted installation leaves files of this engine; at this age, make repeats it.
touch -d @0 "$venv/.installed-$engine"
# As pip does. Where PYTHONDONTWRITEBYTECODE is set, each process that imports vLLM would compile it
# again, which takes as long as all the rest of its import.
"$uv" pip install --quiet --compile-bytecode "${options[@]}" --editable ".[$engine,dev]"
if [[ $engine == cpu ]]; then
    # PyPI and wheel folders may have torchvision for CUDA alone.
    "$venv/bin/python" -m sterna.engine.vllm.guard
fi
