#!/bin/busybox sh
# Runs the limit tests, one by one, on a kernel that has cgroup v2 only, as root and as an
# ordinary user to whom a part of the hierarchy was delegated, and reports each on the console as `VM PASS name` or `VM FAIL name`.
# `VM REBOOT` means that the machine resets itself and must be booted again; `VM DONE` means that all tests have run.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
export CORACLE_BIN=/usr/bin/coracle CORACLE_TEST_ATTACKS=/usr/bin/attacks CORACLE_TEST_SLOWNESS=10
bb=/usr/bin/busybox

# As systemd mounts it.
$bb mount -t cgroup2 -o nsdelegate none /sys/fs/cgroup
$bb mkdir -p /dev/pts /dev/shm
$bb mount -t devpts -o ptmxmode=666 none /dev/pts
$bb mount -t tmpfs none /dev/shm
$bb mount -t tmpfs none /run
$bb ip link set lo up
$bb hostname machine

# Controllers go down only to groups that hold no process themselves.
$bb mkdir /sys/fs/cgroup/checks
echo $$ > /sys/fs/cgroup/checks/cgroup.procs
echo "+memory +cpu +pids" > /sys/fs/cgroup/cgroup.subtree_control

report() { # NAME COMMAND...
    name=$1
    shift
    if "$@" > /tmp/output 2>&1; then
        echo "VM PASS $name"
    else
        echo "VM FAIL $name (status $?)"
        # The server's own log has one JSON object per line and would hide the rest.
        $bb grep -v '^{' /tmp/output | $bb tail -n 40 | $bb sed "s/^/VM NOTE $name: /"
    fi
    # Tests print their own skips.
    $bb sed -n 's/^SKIPPED /VM SKIP /p' /tmp/output
}

only_v2() { # The purpose of this machine: no v1 hierarchy, and the controllers under v2.
    ! $bb grep -q "^cgroup /\|- cgroup " /proc/self/mountinfo || return 1
    for controller in memory cpu pids; do
        $bb grep -qw "$controller" /sys/fs/cgroup/cgroup.subtree_control || return 1
    done
}

# Tests what a reboot of the host leaves of a sandbox. The server's state is on the disk.
state=/var/lib/coracle
marker=/rebooting
export CORACLE_URL=http://127.0.0.1:8080
start_server() {
    $CORACLE_BIN serve --listen 127.0.0.1:8080 --state-dir $state > /tmp/server.out 2> /tmp/server.log &
    $bb timeout 120 sh -c "until $bb grep -q listening /tmp/server.out; do sleep 0.2; done"
}
make_sandbox() {
    start_server || { cat /tmp/server.log; return 1; }
    $CORACLE_BIN create --key box --timeout 1h -e GIVEN=yes > $marker &&
        $CORACLE_BIN exec box -c 'echo kept > /root/file; busybox sync'
}
is_listed_as_stopped() {
    start_server || { cat /tmp/server.log; return 1; }
    $CORACLE_BIN --json ls | $bb tee /tmp/listed
    $bb grep -q '"Failed"' /tmp/listed && $bb grep -q 'host rebooted; its files are kept' /tmp/listed
}
restarts_under_its_name() {
    $CORACLE_BIN create --key box > /tmp/again 2> /tmp/said
    cat /tmp/again $marker /tmp/said
    $bb cmp /tmp/again $marker && $bb grep -q 'host rebooted' /tmp/said &&
        $bb test "$($CORACLE_BIN exec box -c 'echo $(cat /root/file) $GIVEN')" = "kept yes"
}
if test -e $marker; then
    report reboot::is_listed_as_stopped is_listed_as_stopped
    report reboot::restarts_under_its_name restarts_under_its_name
    echo "VM DONE"
    $bb sync
    $bb poweroff -f
fi

echo "VM NOTE kernel $($bb uname -r)"
report only_cgroup_v2 only_v2
report doctor $CORACLE_BIN doctor
$bb sed 's/^/VM NOTE doctor: /' /tmp/output
only=$($bb sed -n 's/.*coracle.only=\([^ ]*\).*/\1/p' /proc/cmdline)
tests=$(/usr/bin/e2e --list --format terse "${only:-limits::}" | $bb sed -n 's/: test$//p')
report limit_tests_exist test -n "$tests"

run_tests() { # PREFIX COMMAND...
    prefix=$1
    shift
    for test in $tests; do
        report "$prefix$test" "$@" $bb timeout 240 /usr/bin/e2e --exact "$test" --include-ignored
    done
}

run_tests ""

# A part of the hierarchy as systemd delegates it: the user owns the group and the files that are needed to
# divide it. The tests are in one group below, and put each command into another.
user=61234
given=/sys/fs/cgroup/given
$bb chmod 1777 /tmp
$bb mkdir -p $given/tests
$bb chown -R $user:$user $given
echo "+memory +cpu +pids" > $given/cgroup.subtree_control
as_user() { # COMMAND...
    $bb sh -c 'echo 0 > "$0/tests/cgroup.procs" && exec "$@"' $given \
        /usr/bin/setpriv --reuid $user --regid $user --clear-groups --inh-caps=-all \
        env HOME=/tmp CORACLE_TEST_DELEGATED=$given "$@"
}
held_by_groups() { # The doctor of an ordinary user, started as systemd would start it.
    as_user sh -c 'mkdir $CORACLE_TEST_DELEGATED/doctor && echo $$ > $CORACLE_TEST_DELEGATED/doctor/cgroup.procs &&
        exec coracle doctor' || return 1
    for limit in memory cpu pids; do
        $bb grep -q "^$limit  *cgroup v2" /tmp/output || return 1
    done
}
report delegated::doctor held_by_groups
$bb sed 's/^/VM NOTE delegated doctor: /' /tmp/output
run_tests delegated:: as_user
nothing_is_left() {
    left=$($bb find $given -mindepth 2 -type d)
    echo "$left"
    test -z "$left"
}
report delegated::nothing_is_left nothing_is_left

# A kernel that allows no user namespaces.
fix_is_printed() {
    before=$(cat /proc/sys/user/max_user_namespaces)
    echo 0 > /proc/sys/user/max_user_namespaces
    as_user coracle doctor
    status=$?
    echo "$before" > /proc/sys/user/max_user_namespaces
    test $status -ne 0 && $bb grep -q "sysctl -w user.max_user_namespaces=15000" /tmp/output
}
report restricted::fix_is_printed fix_is_printed

# A container: the visible root of the hierarchy is its own group, which holds its processes.
container=/sys/fs/cgroup/container
$bb mkdir $container
echo 1073741824 > $container/memory.max
in_container() { # COMMAND...
    $bb unshare -m -p -f $bb sh -c 'echo 0 > "$0/cgroup.procs" && /usr/bin/busybox mount --bind "$0" /sys/fs/cgroup &&
        /usr/bin/busybox mount -t proc none /proc && "$@"' $container "$@"
}
container_has_groups_and_limits() {
    in_container coracle doctor
    $bb grep -q "^ok  *control groups" /tmp/output && $bb grep -q "^memory  *1Gi  *this container  *cgroup v2" /tmp/output
}
report container::has_groups_and_limits container_has_groups_and_limits
$bb find $container -depth -mindepth 1 -type d -exec $bb rmdir {} +
$bb rmdir $container

report reboot::make_sandbox make_sandbox
$bb sync
echo "VM REBOOT"
# Let the console print the line, then reset at once, as in a power failure.
sleep 1
echo b > /proc/sysrq-trigger
