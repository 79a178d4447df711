# The session of a page's blocks: sourced by the generated script of a page, in its own namespaces.
# DOCS_DIR has the page's files, DOCS_PYTHON the interpreter; fd 9 is the network of the host.
# Names begin with two underscores, so that pages can use all others.

ip link set lo up
mkfifo "$DOCS_DIR/ready" "$DOCS_DIR/orders" "$DOCS_DIR/replies"
set -eE -o pipefail
trap '__failed "$LINENO" "$BASH_COMMAND" "${BASH_SOURCE[0]}"' ERR
trap '__finish' EXIT

# Records which command failed. Only the first report counts: later ones are consequences of it. Lines of
# files other than blocks mean nothing to a reader of the page and are recorded as 0.
__failed() {
  local line=0
  case "$3" in "$DOCS_DIR/blocks/"*) line=$1 ;; esac
  [ -e "$DOCS_DIR/failure" ] || printf '%s\n%s\n' "$line" "$2" >"$DOCS_DIR/failure"
}

# Marks in the log where the output of a block begins.
__block() {
  printf '%s\n' "$1" >"$DOCS_DIR/block"
  : >"$DOCS_DIR/log"
}

# Waits until the server that was just started in the background is ready.
__wait_for_server() {
  exec 6<"$DOCS_DIR/ready"
  local line
  while read -r -t 60 line <&6; do
    case "$line" in "coracle listening on "*) return ;; esac
  done
  echo "coracle serve did not become ready" >&2
  return 1
}

# Runs a block in the page's interpreter, which sees the exports of the shell.
__python() {
  env -0 >"$DOCS_DIR/environment"
  if [ -z "${__python_runs-}" ]; then
    # Not a job of this shell: pages count their own jobs.
    ("$DOCS_PYTHON" -u "$DOCS_DIR/session.py" "$DOCS_DIR" 6<&- 9<&- &)
    exec 7>"$DOCS_DIR/orders" 8<"$DOCS_DIR/replies"
    __python_runs=yes
  fi
  local reply
  printf '%s\n' "$1" >&7
  read -r reply <&8 && [ "$reply" = ok ]
}

# Runs a block in its own shell, in the network of the host.
__on_host_network() {
  export -f __failed
  nsenter --net=/proc/self/fd/9 bash -eE -o pipefail -c \
    'trap '\''__failed "$LINENO" "$BASH_COMMAND" "${BASH_SOURCE[0]}"'\'' ERR; . "$0"' "$1"
}

# Connects the page's network with that of the host, as a host is connected with the internet: sandboxes of the
# page reach it over the page's own links and NAT.
__connect_to_internet() {
  [ -z "${__connected-}" ] || return 0
  mkfifo "$DOCS_DIR/connected"
  # Not a job of this shell, as above. It ends with the page's process namespace.
  (nsenter --net=/proc/self/fd/9 slirp4netns --configure --mtu=1500 --netns-type=path --ready-fd=5 \
    "/proc/$$/ns/net" uplink0 5>"$DOCS_DIR/connected" 6<&- 7>&- 8<&- &)
  local ready
  read -r -t 30 -n 1 ready <"$DOCS_DIR/connected"
  # Its own name server, which asks that of the host.
  printf 'nameserver 10.0.2.3\n' >"$DOCS_DIR/resolv.conf"
  mount --bind "$DOCS_DIR/resolv.conf" /etc/resolv.conf
  # A setting of the page's own network.
  echo 1 >/proc/sys/net/ipv4/ip_forward
  __connected=yes
}

# Removes the page's sandboxes and ends its server, so that nothing is left on the host.
__finish() {
  trap - ERR
  set +eE
  {
    coracle rm --all
    for __job in $(jobs -p); do kill "$__job"; done
    wait
  } >/dev/null 2>&1
}
