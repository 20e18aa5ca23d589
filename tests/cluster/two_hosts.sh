#!/bin/bash
# two_hosts.sh N COMMAND...     run COMMAND on a host `launcher` that reaches the hosts server1 to serverN by ssh
#
# Each host has a name, a network, processes, shared memory and a home directory of its own; other files are those of
# this machine, as if shared. All lives in namespaces: when COMMAND ends or this script is killed, the kernel ends every
# host. Needs root, iproute2 and openssh-server. From COMMAND:
#
#   ip link set v2 down                                     cuts server2 off
#   kill -9 $(pgrep -P $(cat /run/bed/server2.pid))         kills server2
#   ip netns exec server2 ss -ltn                           looks at its sockets
set -eu
if [ "${ALLSTEP_BED:-}" != inside ]; then
  ALLSTEP_BED=inside exec unshare --net --mount --uts --ipc --pid --fork --kill-child --mount-proc bash "$0" "$@"
fi
num_hosts=$1
shift
bed=/run/bed
network=10.77.0

mount -t tmpfs -o mode=755 tmpfs /run # sshd trusts no directory that others may write to
mkdir -p /run/netns /run/sshd $bed/ssh $bed/home
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs -o mode=700 tmpfs $bed/home
hostname launcher

# Names, users and ssh: over the machine's own files, in these namespaces alone.
{
  echo "127.0.0.1 localhost"
  echo "$network.100 launcher"
  for i in $(seq "$num_hosts"); do echo "$network.$i server$i"; done
} >$bed/hosts
sed "s|^\(root:.*:\)[^:]*:\([^:]*\)$|\1$bed/home:\2|" /etc/passwd >$bed/passwd
ssh-keygen -q -t ed25519 -N '' -f $bed/ssh/id
ssh-keygen -q -t ed25519 -N '' -f $bed/ssh/hostkey
cat >$bed/ssh/sshd_config <<END
HostKey /etc/ssh/hostkey
AuthorizedKeysFile /etc/ssh/id.pub
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
PidFile none
MaxStartups 100
END
cat >$bed/ssh/ssh_config <<END
Host *
  IdentityFile /etc/ssh/id
  UserKnownHostsFile /dev/null
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking no
  LogLevel ERROR
END
mount --bind $bed/hosts /etc/hosts
mount --bind $bed/passwd /etc/passwd
mount --bind $bed/ssh /etc/ssh
export HOME=$bed/home

# One network: the launcher's bridge bears the name that the interfaces of the other hosts have.
ip link set lo up
ip link add eth0 type bridge
ip addr add $network.100/24 dev eth0
ip link set eth0 up
for i in $(seq "$num_hosts"); do
  ip netns add "server$i"
  ip link add "v$i" type veth peer name eth0 netns "server$i"
  ip link set "v$i" master eth0 up
  ip -n "server$i" addr add "$network.$i/24" dev eth0
  ip -n "server$i" link set eth0 up
  ip -n "server$i" link set lo up
  ip netns exec "server$i" unshare --uts --ipc --pid --fork --kill-child --mount-proc bash -c "
    mount -t tmpfs tmpfs /dev/shm
    mount -t tmpfs -o mode=700 tmpfs $bed/home
    hostname server$i
    exec /usr/sbin/sshd -D -e" </dev/null >"$bed/server$i.log" 2>&1 &
  echo $! >"$bed/server$i.pid"
done
for i in $(seq "$num_hosts"); do
  for _ in $(seq 3000); do
    (exec 3<>"/dev/tcp/server$i/22") 2>/dev/null && break
    sleep 0.02
  done
done
unset ALLSTEP_BED
"$@"
