#!/bin/busybox sh
# Tests what an ordinary user meets on a kernel whose AppArmor restricts user namespaces, as on Ubuntu 24.04: coracle
# names the fix, and the fix works. Reports like `checks.sh`.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8
bb=/usr/bin/busybox
setting=/proc/sys/kernel/apparmor_restrict_unprivileged_userns
profiles=/etc/apparmor.d

$bb mount -t securityfs none /sys/kernel/security
$bb mount -t cgroup2 -o nsdelegate none /sys/fs/cgroup
$bb mkdir -p /dev/pts /dev/shm
$bb mount -t devpts -o ptmxmode=666 none /dev/pts
$bb mount -t tmpfs none /dev/shm
$bb mount -t tmpfs none /run
$bb mount -t tmpfs none /tmp
$bb chmod 1777 /tmp
$bb ip link set lo up

# The parser is Ubuntu's, with the C library that it was built for.
$bb cat > /usr/sbin/apparmor_parser << 'PARSER'
#!/bin/busybox sh
exec /opt/apparmor/ld-linux-x86-64.so.2 --library-path /opt/apparmor /opt/apparmor/apparmor_parser --skip-cache "$@"
PARSER
$bb chmod 755 /usr/sbin/apparmor_parser

report() { # NAME COMMAND...
    name=$1
    shift
    if "$@" > /run/output 2>&1; then
        echo "VM PASS $name"
    else
        echo "VM FAIL $name (status $?)"
        $bb tail -n 40 /run/output | $bb sed "s/^/VM NOTE $name: /"
    fi
}
as_user() { # COMMAND...
    /usr/bin/setpriv --reuid 61234 --regid 61234 --clear-groups --inh-caps=-all env HOME=/tmp "$@"
}
user_cannot_mount() { # In a user namespace of a program without a profile.
    ! as_user $bb unshare -U -r -m $bb mount -t tmpfs none /mnt
}
restrict() {
    apparmor_parser -r $profiles/unprivileged_userns && echo 1 > $setting && user_cannot_mount
}
prints_the_fix() { # COMMAND...
    as_user "$@"
    status=$?
    test $status -ne 0 && $bb grep -q "apparmor_parser -r $profiles/coracle" /run/output
}
printed_profile_loads() { # What the doctor printed, as its reader would copy it.
    $bb sed -n '/^ *abi </,/^ *}$/p' /run/doctor > $profiles/coracle
    $bb cat $profiles/coracle
    apparmor_parser -r $profiles/coracle
}
user_runs() {
    as_user coracle doctor || return 1
    test "$(as_user coracle run -- sh -c 'echo inside; id -u')" = "inside
0"
}
others_stay_restricted() {
    user_cannot_mount && as_user /usr/bin/true
}
setting_lets_user_run() { # The other fix, for all programs.
    apparmor_parser -R $profiles/coracle && echo 0 > $setting && user_runs
}

echo "VM NOTE kernel $($bb uname -r)"
report restricted::kernel_restricts restrict
report restricted::root_runs coracle run -- true
report restricted::run_prints_the_fix prints_the_fix coracle run -- true
report restricted::doctor_prints_the_fix prints_the_fix coracle doctor
$bb cp /run/output /run/doctor
report restricted::printed_profile_loads printed_profile_loads
report restricted::profile_lets_user_run user_runs
report restricted::others_stay_restricted others_stay_restricted
report restricted::setting_lets_user_run setting_lets_user_run
echo "VM DONE"
$bb poweroff -f
