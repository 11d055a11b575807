// Package cgroup makes one control group a run: its limits, its books and its end.
//
// The trap first. A [Leaf] is used for one run and never again: once a leaf of
// cgroup v2 has been killed, newer kernels (seen on 6.18, not on 6.1) kill
// whatever is started in it later, even if it was empty at the time. The second trap: a process joins the v1
// part of a leaf by writing "0" to each file of [Leaf.Tasks] itself, while it
// has a single thread. Writing its pid to cgroup.procs instead costs a grace
// period of several milliseconds, and a second thread would stay outside.
//
// What it promises:
//
//   - A limit is in force when [Host.NewLeaf] returns, or NewLeaf fails and
//     leaves nothing behind. Each value was read back; [Leaf.Applied] has what
//     the kernel made of it. Swap is bounded together with memory, or refused.
//   - What cannot be enforced on this host is a [*UnsupportedError] that says
//     which controller, where, why and what to do about it.
//   - Nothing is given in place of what was asked for: CPUs that the launcher's
//     cgroup has not, a device that is not there and MemoryHigh on cgroup v1 are
//     refused.
//   - OOM kills, peaks, refused forks and CPU time come from the kernel's
//     counters of this leaf, which start at zero. A counter that the kernel
//     does not have is -1.
//   - [Leaf.Kill] ends all processes of the leaf and of groups made inside it.
//     It signals by cgroup.kill or by pidfd, never by a bare pid.
//   - Nothing is made above the caller's own cgroup, and only groups named
//     [Prefix]* are made. What is killed or removed is a leaf, known by its name and
//     the sticky bit that it was made with: a group of such a name that somebody
//     else made is not touched.
//   - The maker of a leaf holds a lock on its directories. [Host.Collect]
//     removes the leaves whose lock is free: their maker is dead.
//
// What it does not promise:
//
//   - A limit of written bytes holds for direct and synchronous writes only,
//     unless cgroup v2 has both io and memory: see [IOLimit].
//   - It starts no process and moves none, but for one case: on cgroup v2 the
//     caller's own cgroup may not hold processes once its children have limits,
//     unless it is the root. If the caller is alone there, it moves itself to a
//     child named jail-launcher, and its cgroup is the parent from then on, for
//     its children too. If it is not alone, the limits are refused. For cpuset it
//     also needs the right to schedule every process that its cgroup has below.
//   - Collect finds leaves below the caller's own cgroup only. What a launcher
//     of another session or unit left behind is seen only from there.
//   - A process that may write to cgroupfs can leave its leaf. Keep cgroupfs
//     out of the jail, or read-only.
//   - A process with oom_score_adj -1000 is spared by the OOM killer, and its
//     children inherit that. Whoever starts the jail has to reset it.
//
// Both cgroup versions are supported, also side by side (hybrid): then the
// limits are in the v1 hierarchies that have the controllers, and the leaf's v2
// part serves to start, count and kill. The package builds on the root package
// of github.com/containerd/cgroups/v3 and not on its cgroup1 and cgroup2: these
// two bring protobuf and D-Bus, which adds more than a millisecond to the start
// of every process.
package cgroup
