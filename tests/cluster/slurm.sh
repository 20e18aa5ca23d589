#!/bin/bash
# slurm.sh N COMMAND...     run COMMAND on the launcher host of two_hosts.sh, whose other hosts are a Slurm cluster
#
# slurmctld on the launcher, slurmd on server1 to serverN, munge for all of them. Two partitions: what is submitted to
# `urgent` takes the hosts from jobs in `normal`, after a notice and a grace time. Ends with the bed.
set -eu
num_hosts=$1
shift
slurm=/run/slurm
mkdir -p $slurm/state /run/munge
dd if=/dev/urandom of=/run/munge/key bs=1024 count=1 status=none
chmod 600 /run/munge/key
chown -R munge: /run/munge
chmod 755 /run/munge
setpriv --reuid munge --regid munge --clear-groups munged --key-file /run/munge/key --log-file /run/munge/log \
  --pid-file /run/munge/pid --seed-file /run/munge/seed --num-threads 2

cat >$slurm/slurm.conf <<END
ClusterName=bed
SlurmctldHost=launcher
SlurmUser=root
SlurmctldPidFile=$slurm/slurmctld.pid
SlurmdPidFile=$slurm/slurmd-%n.pid
SlurmctldLogFile=$slurm/slurmctld.log
SlurmdLogFile=$slurm/slurmd-%n.log
SlurmdSpoolDir=$slurm/spool-%n
StateSaveLocation=$slurm/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
SchedulerParameters=sched_interval=2,bf_interval=2,requeue_setup_env_fail
ReturnToService=2
KillWait=20
AuthInfo=cred_expire=5
NodeName=server[1-$num_hosts] CPUs=4 State=UNKNOWN
PartitionName=normal Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=120
PartitionName=urgent Nodes=ALL PriorityTier=9 PreemptMode=OFF
END
export SLURM_CONF=$slurm/slurm.conf
slurmctld
for i in $(seq "$num_hosts"); do
  mkdir -p "$slurm/spool-server$i"
  # slurmd looks for control groups even where it makes none.
  # shellcheck disable=SC2029 # it is this shell's configuration
  ssh "server$i" "mount -t tmpfs tmpfs /sys/fs/cgroup; mkdir /sys/fs/cgroup/systemd
    mount -t cgroup -o none,name=systemd none /sys/fs/cgroup/systemd
    SLURM_CONF=$SLURM_CONF slurmd -N server$i"
done
for _ in $(seq 600); do
  [ "$(sinfo -h -t idle -o %D 2>/dev/null)" = "$num_hosts" ] && break
  sleep 0.2
done
"$@"
