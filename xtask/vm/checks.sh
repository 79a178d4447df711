#!/bin/busybox sh
# Runs the limit tests, one by one, on a kernel that has cgroup v2 only, and reports each on
# the console as `VM PASS name` or `VM FAIL name`. `VM DONE` says that none was left out.
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
    # Tests say themselves what they leave out.
    $bb sed -n 's/^SKIPPED /VM SKIP /p' /tmp/output
}

only_v2() { # The point of this machine: no v1 hierarchy, and the controllers under v2.
    ! $bb grep -q "^cgroup /\|- cgroup " /proc/self/mountinfo || return 1
    for controller in memory cpu pids; do
        $bb grep -qw "$controller" /sys/fs/cgroup/cgroup.subtree_control || return 1
    done
}

echo "VM NOTE kernel $($bb uname -r)"
report only_cgroup_v2 only_v2
report doctor $CORACLE_BIN doctor
$bb sed 's/^/VM NOTE doctor: /' /tmp/output
only=$($bb sed -n 's/.*coracle.only=\([^ ]*\).*/\1/p' /proc/cmdline)
tests=$(/usr/bin/e2e --list --format terse "${only:-limits::}" | $bb sed -n 's/: test$//p')
report limit_tests_exist test -n "$tests"
for test in $tests; do
    report "$test" $bb timeout 240 /usr/bin/e2e --exact "$test" --include-ignored
done
echo "VM DONE"
$bb sync
$bb poweroff -f
