# Make an isolated root and wait in it, as the first process of new namespaces: sandbox.py starts this script by
# `unshare --user --map-root-user ...`, so "root" has rights over these namespaces only. Prints the process id as seen from
# outside. When this process is killed, the kernel kills all others inside.
# Arguments: the size of all files in MB, and `wait`, or `end` to see only whether it can be made.
set -eu
PATH=/usr/sbin:/usr/bin:/sbin:/bin
read -r pid rest < /proc/self/stat # the old /proc, so the number is the one outside

# All that can be written lies in one tmpfs of limited size. Mounts made here are seen by nobody outside.
mount -t tmpfs -o "size=$1m,nr_inodes=200k,mode=755,nosuid,nodev" tmpfs /tmp
cd /tmp
mkdir -p usr proc dev/shm etc root run var/tmp tmp app logs/agent logs/verifier tests home opt mnt srv old
chmod 1777 tmp var/tmp dev/shm

# Programs and libraries of the system, to read and run.
for name in usr bin sbin lib lib32 lib64 libx32; do
    if [ -L "/$name" ]; then
        cp -P "/$name" .
    elif [ -d "/$name" ]; then
        mkdir -p "$name"
        mount --rbind "/$name" "$name"
        targets=$(findmnt --raw --noheadings --submounts --output TARGET "/tmp/$name")
        for target in $targets; do
            mount -o remount,bind,ro,nosuid,nodev "$target"
        done
    fi
done

# Of /etc only what programs need to start; nothing about the machine's users, hosts or services.
for name in alternatives ld.so.cache ld.so.conf ld.so.conf.d localtime mime.types os-release python3; do
    [ ! -e "/etc/$name" ] || cp -a --no-preserve=ownership "/etc/$name" etc/
done
printf 'root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n' > etc/passwd
printf 'root:x:0:\nnogroup:x:65534:\n' > etc/group
printf '127.0.0.1 localhost\n::1 localhost\n' > etc/hosts
printf 'passwd: files\ngroup: files\nhosts: files\n' > etc/nsswitch.conf

for name in null zero full random urandom; do
    : > "dev/$name"
    mount --bind "/dev/$name" "dev/$name"
done
ln -s /proc/self/fd dev/fd
ln -s /proc/self/fd/0 dev/stdin
ln -s /proc/self/fd/1 dev/stdout
ln -s /proc/self/fd/2 dev/stderr
mount -t proc -o nosuid,nodev,noexec proc proc

# Leave the old root. Its mounts are gone for every process that starts here.
pivot_root . old
cd /
umount -l /old
rmdir /old

ip link set lo up 2> /dev/null || : # the only interface; without iproute2 it stays down
echo 0 > /proc/sys/net/ipv4/ip_unprivileged_port_start
echo 0 > /proc/sys/user/max_user_namespaces # rights over namespaces cannot be had again by making others
mkfifo -m 600 /run/hold
echo "ready $pid"
[ "$2" = wait ] || exit 0
# Bash reaps orphans that end. It keeps one right, so that processes without any can neither trace nor read it.
exec setpriv --no-new-privs --bounding-set=-all,+kill --inh-caps=-all --ambient-caps=-all \
    bash -c 'exec 3<> /run/hold; while :; do read -r _ <&3; done' < /dev/null > /dev/null 2>&1
