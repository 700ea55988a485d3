// SPDX-License-Identifier: GPL-2.0

//! Links, switches and the way through them: one or more planes of leaves and spines.
//!
//! A port is a queue, a line and a delay. Without PFC a packet's departure is known when it
//! enters a port, so that a hop costs one event; with PFC the queue is kept, since it may be
//! stopped.

#![forbid(unsafe_code)]

use super::packet::Packet;
use crate::Rng;
use std::collections::VecDeque;

/// Picoseconds.
pub(crate) type Ps = u64;

/// One nanosecond.
pub(crate) const NS: Ps = 1_000;

/// What Ethernet adds to an IP packet on the line: header, FCS, preamble, gap.
pub(crate) const ETHERNET: u32 = 14 + 4 + 20;

/// What the fabric is made of.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pub(crate) hosts: usize,
    pub(crate) hosts_per_leaf: usize,
    pub(crate) spines: usize,
    pub(crate) planes: usize,
    /// Of a host's line in each plane, bit/s.
    pub(crate) rate: f64,
    /// Of the lines between leaves and spines.
    pub(crate) spine_rate: f64,
    /// Of the ports of leaves towards hosts.
    pub(crate) down_rate: f64,
    /// Of each link.
    pub(crate) delay: Ps,
    /// The last `far` hosts are this much further away from their leaves.
    pub(crate) far: usize,
    pub(crate) far_delay: Ps,
    /// Bytes that a switch port may queue.
    pub(crate) buffer: u64,
    /// Bytes from which packets are marked, up to which probability, and bytes from which
    /// all are. 0 is never.
    pub(crate) mark_min: u64,
    pub(crate) mark_max: u64,
    pub(crate) mark_chance: f64,
    /// Part that the present queue has in the average by which RED marks; 0: no RED, the queue
    /// itself is what counts.
    pub(crate) red_weight: f64,
    /// Bytes that may queue in a host's own port.
    pub(crate) host_buffer: u64,
    /// Switches stop the port that fills them, at so many bytes of it; 0 is no PFC.
    pub(crate) pfc: u64,
    /// Packets go where the queue is shortest and no queue is ever full.
    pub(crate) ideal: bool,
}

/// Where a line ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Node {
    Host(u32),
    Leaf { plane: u16, leaf: u16 },
    Spine { plane: u16, spine: u16 },
}

/// A sending port with its line.
pub(crate) struct Port {
    pub(crate) to: Node,
    pub(crate) ps_per_byte: f64,
    pub(crate) delay: Ps,
    pub(crate) limit: u64,
    mark_min: u64,
    mark_max: u64,
    mark_chance: f64,
    red: Option<Red>,
    /// Packets that vanish on the line, in 2^-32.
    pub(crate) loss: u64,
    /// Bit errors and the like beyond: the line is dead.
    pub(crate) alive: bool,
    pub(crate) busy_until: Ps,
    /// With PFC: what waits, whether the line is busy, whether the other end has stopped it.
    queue: VecDeque<u32>,
    queued: u64,
    sending: Option<u32>,
    paused: bool,
    /// Bytes of packets from this port that the switch at its end holds, and what it was told.
    held: u64,
    told: bool,
    pub(crate) stats: PortStats,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PortStats {
    pub(crate) packets: u64,
    pub(crate) bytes: u64,
    pub(crate) dropped: u64,
    pub(crate) lost: u64,
    pub(crate) marked: u64,
    pub(crate) longest: u64,
    pub(crate) pauses: u64,
    /// Longest queue since the last sample.
    pub(crate) recent: u64,
}

/// What became of a packet at a port.
pub(crate) enum Sent {
    /// It arrives at the other end then.
    Arrives(Ps),
    /// It waits (PFC).
    Waits,
    /// There is no room, or the line is dead.
    Dropped,
}

impl Port {
    fn new(to: Node, rate: f64, delay: Ps) -> Self {
        Self {
            to,
            ps_per_byte: 8e12 / rate,
            delay,
            limit: u64::MAX,
            mark_min: 0,
            mark_max: 0,
            mark_chance: 0.0,
            red: None,
            loss: 0,
            alive: true,
            busy_until: 0,
            queue: VecDeque::new(),
            queued: 0,
            sending: None,
            paused: false,
            held: 0,
            told: false,
            stats: PortStats::default(),
        }
    }

    /// Bytes that wait.
    pub(crate) fn backlog(&self, now: Ps) -> u64 {
        if self.queued != 0 {
            return self.queued;
        }
        (self.busy_until.saturating_sub(now) as f64 / self.ps_per_byte) as u64
    }

    fn admit(&mut self, now: Ps, p: &mut Packet, rng: &mut Rng) -> bool {
        let size = u64::from(p.size);
        let before = self.backlog(now);
        if before + size > self.limit {
            self.stats.dropped += 1;
            return false;
        }
        if let Some(red) = &mut self.red {
            let bounds = (self.mark_min as f64, self.mark_max as f64);
            if red.marks(before as f64, bounds, self.mark_chance, rng) {
                p.ce = true;
                self.stats.marked += 1;
            }
        } else if self.mark_min != 0 && before >= self.mark_min {
            let all = before >= self.mark_max;
            let over = (before - self.mark_min) as f64;
            let span = (self.mark_max - self.mark_min).max(1) as f64;
            let chance = over / span * self.mark_chance;
            if all || unit(rng) < chance {
                p.ce = true;
                self.stats.marked += 1;
            }
        }
        self.stats.longest = self.stats.longest.max(before + size);
        self.stats.recent = self.stats.recent.max(before + size);
        self.stats.packets += 1;
        self.stats.bytes += size;
        true
    }

    fn is_lost(&mut self, rng: &mut Rng) -> bool {
        let lost = !self.alive || (self.loss != 0 && rng.next() >> 32 < self.loss);
        self.stats.lost += u64::from(lost);
        lost
    }

    pub(crate) fn line_time(&self, bytes: u32) -> Ps {
        (f64::from(bytes) * self.ps_per_byte) as Ps
    }
}

/// A number from 0 up to 1.
fn unit(rng: &mut Rng) -> f64 {
    (rng.next() >> 11) as f64 / ((1u64 << 53) as f64)
}

/// Random early detection as Floyd and Jacobson describe it, and as Linux has it (red.h): the
/// average of the queue decides, and marks keep a distance from each other: after one, the next
/// comes within 1 / chance packets, with equal probability for each of them.
#[derive(Clone, Copy, Debug)]
struct Red {
    weight: f64,
    average: f64,
    /// Packets since the last mark; none while the average is below the lower bound.
    count: Option<f64>,
    /// How far away the next mark is, as a part of 1 / chance.
    draw: f64,
}

impl Red {
    /// Whether the packet that finds `queue` bytes ahead of it is marked.
    fn marks(&mut self, queue: f64, (min, max): (f64, f64), chance: f64, rng: &mut Rng) -> bool {
        self.average += (queue - self.average) * self.weight;
        if self.average < min || self.average >= max {
            self.count = None;
            return self.average >= max;
        }
        let Some(count) = self.count else {
            self.count = Some(0.0);
            self.draw = unit(rng);
            return false;
        };
        let chance = (self.average - min) / (max - min) * chance;
        let marks = (count + 1.0) * chance >= self.draw;
        self.count = Some(if marks { 0.0 } else { count + 1.0 });
        if marks {
            self.draw = unit(rng);
        }
        marks
    }
}

/// All ports.
pub(crate) struct Fabric {
    pub(crate) layout: Layout,
    pub(crate) ports: Vec<Port>,
    pub(crate) leaves: usize,
    /// Spines that a leaf knows to be reachable from it, and to reach it.
    up_mask: Vec<u64>,
    down_mask: Vec<u64>,
    salt: Vec<u64>,
}

impl Fabric {
    pub(crate) fn new(layout: Layout, rng: &mut Rng) -> Self {
        let l = &layout;
        let leaves = l.hosts.div_ceil(l.hosts_per_leaf);
        let mut ports = Vec::new();
        for h in 0..l.hosts {
            for plane in 0..l.planes {
                let leaf = (h / l.hosts_per_leaf) as u16;
                let plane = plane as u16;
                let mut p = Port::new(Node::Leaf { plane, leaf }, l.rate, l.delay);
                if h + l.far >= l.hosts {
                    p.delay += l.far_delay;
                }
                p.limit = l.host_buffer;
                ports.push(p);
            }
        }
        let switch = |to, rate| {
            let mut p = Port::new(to, rate, l.delay);
            p.limit = l.buffer;
            (p.mark_min, p.mark_max) = (l.mark_min, l.mark_max.max(l.mark_min));
            p.mark_chance = l.mark_chance;
            if l.red_weight > 0.0 && l.mark_min != 0 {
                p.red = Some(Red {
                    weight: l.red_weight,
                    average: 0.0,
                    count: None,
                    draw: 0.0,
                });
            }
            if l.pfc != 0 || l.ideal {
                p.limit = u64::MAX;
            }
            if l.ideal {
                p.mark_min = 0;
                p.red = None;
            }
            p
        };
        for _ in 0..l.planes {
            for h in 0..l.hosts {
                let mut p = switch(Node::Host(h as u32), l.down_rate);
                if h + l.far >= l.hosts {
                    p.delay += l.far_delay;
                }
                ports.push(p);
            }
        }
        for plane in 0..l.planes as u16 {
            for _ in 0..leaves {
                for spine in 0..l.spines as u16 {
                    ports.push(switch(Node::Spine { plane, spine }, l.spine_rate));
                }
            }
        }
        for plane in 0..l.planes as u16 {
            for _ in 0..l.spines {
                for leaf in 0..leaves as u16 {
                    ports.push(switch(Node::Leaf { plane, leaf }, l.spine_rate));
                }
            }
        }
        let all = if l.spines >= 64 {
            u64::MAX
        } else {
            (1u64 << l.spines) - 1
        };
        let salts = l.planes * leaves + l.hosts;
        Self {
            leaves,
            up_mask: vec![all; l.planes * leaves],
            down_mask: vec![all; l.planes * leaves],
            salt: (0..salts).map(|_| rng.next()).collect(),
            ports,
            layout,
        }
    }

    /// The port of a host.
    pub(crate) fn host_port(&self, host: usize, plane: usize) -> usize {
        host * self.layout.planes + plane
    }

    /// The port towards a host.
    pub(crate) fn down_port(&self, host: usize, plane: usize) -> usize {
        let l = &self.layout;
        l.hosts * l.planes + plane * l.hosts + host
    }

    /// The port of a leaf towards a spine.
    pub(crate) fn leaf_port(&self, plane: usize, leaf: usize, spine: usize) -> usize {
        let l = &self.layout;
        2 * l.hosts * l.planes + (plane * self.leaves + leaf) * l.spines + spine
    }

    /// The port of a spine towards a leaf.
    pub(crate) fn spine_port(&self, plane: usize, spine: usize, leaf: usize) -> usize {
        let l = &self.layout;
        2 * l.hosts * l.planes
            + l.planes * self.leaves * l.spines
            + (plane * l.spines + spine) * self.leaves
            + leaf
    }

    /// Tells the leaves which spines they reach, from what is alive now.
    pub(crate) fn converge(&mut self) {
        for plane in 0..self.layout.planes {
            for leaf in 0..self.leaves {
                let (mut up, mut down) = (0, 0);
                for s in 0..self.layout.spines {
                    let (u, d) = (
                        self.leaf_port(plane, leaf, s),
                        self.spine_port(plane, s, leaf),
                    );
                    up |= u64::from(self.ports[u].alive) << s;
                    down |= u64::from(self.ports[d].alive) << s;
                }
                self.up_mask[plane * self.leaves + leaf] = up;
                self.down_mask[plane * self.leaves + leaf] = down;
            }
        }
    }

    /// The plane over which a host sends a flow: its routes are chosen by the same hash.
    pub(crate) fn plane_of(&self, now: Ps, host: usize, hash: u64) -> usize {
        let n = self.layout.planes;
        if n == 1 {
            return 0;
        }
        if self.layout.ideal {
            let alive = |p: &usize| {
                let q = &self.ports[self.host_port(host, *p)];
                (!q.alive, q.busy_until.max(now))
            };
            return (0..n).min_by_key(alive).unwrap_or(0);
        }
        let salt = self.salt[self.layout.planes * self.leaves + host];
        (mix(hash ^ salt) % n as u64) as usize
    }

    /// The port by which a packet leaves the switch `at`.
    pub(crate) fn route(&self, now: Ps, at: Node, p: &Packet) -> Option<usize> {
        let dst = p.dst as usize;
        let to = dst / self.layout.hosts_per_leaf;
        match at {
            Node::Host(_) => None,
            Node::Spine { plane, spine } => Some(self.spine_port(plane.into(), spine.into(), to)),
            Node::Leaf { plane, leaf } => {
                let (plane, leaf) = (usize::from(plane), usize::from(leaf));
                if to == leaf {
                    return Some(self.down_port(dst, plane));
                }
                let base = plane * self.leaves;
                let mask = self.up_mask[base + leaf] & self.down_mask[base + to];
                let n = mask.count_ones();
                if n == 0 {
                    return None;
                }
                let spine = if self.layout.ideal {
                    self.emptiest(now, plane, leaf, to)
                } else {
                    let k = mix(p.hash ^ self.salt[base + leaf]) % u64::from(n);
                    nth(mask, k as u32)
                };
                Some(self.leaf_port(plane, leaf, spine))
            }
        }
    }

    fn emptiest(&self, now: Ps, plane: usize, from: usize, to: usize) -> usize {
        let cost = |s: &usize| {
            let (a, b) = (
                &self.ports[self.leaf_port(plane, from, *s)],
                &self.ports[self.spine_port(plane, *s, to)],
            );
            let wait = a.busy_until.max(b.busy_until).max(now);
            let time = (a.ps_per_byte.max(b.ps_per_byte) * 4096.0) as u64;
            (!(a.alive && b.alive), wait + time)
        };
        (0..self.layout.spines).min_by_key(cost).unwrap_or(0)
    }

    /// Puts a packet into a port.
    pub(crate) fn send(
        &mut self,
        now: Ps,
        port: usize,
        id: u32,
        p: &mut Packet,
        rng: &mut Rng,
    ) -> Sent {
        let pfc = self.layout.pfc != 0;
        let q = &mut self.ports[port];
        if !q.admit(now, p, rng) {
            return Sent::Dropped;
        }
        if pfc {
            q.queued += u64::from(p.size);
            q.queue.push_back(id);
            return Sent::Waits;
        }
        let departs = q.busy_until.max(now) + q.line_time(p.size);
        q.busy_until = departs;
        if q.is_lost(rng) {
            return Sent::Dropped;
        }
        Sent::Arrives(departs + q.delay)
    }

    /// With PFC: begins to send what waits, if the line is free. Gives the packet.
    pub(crate) fn start(&mut self, port: usize) -> Option<u32> {
        let q = &mut self.ports[port];
        if q.sending.is_some() || q.paused {
            return None;
        }
        q.sending = q.queue.pop_front();
        q.sending
    }

    /// With PFC: the packet on the line has left. Gives it, or nothing when it is lost.
    pub(crate) fn finish(&mut self, port: usize, size: u32, rng: &mut Rng) -> (Option<u32>, bool) {
        let q = &mut self.ports[port];
        q.queued -= u64::from(size);
        let id = q.sending.take();
        let lost = q.is_lost(rng);
        (id, lost)
    }

    pub(crate) fn is_idle(&self, now: Ps, port: usize) -> bool {
        let q = &self.ports[port];
        if self.layout.pfc != 0 {
            q.sending.is_none() && q.queue.is_empty() && !q.paused
        } else {
            q.busy_until <= now
        }
    }

    /// With PFC: a switch takes a packet that came over `port`, or has passed it on. Gives
    /// what the port is to be told, if anything.
    pub(crate) fn hold(&mut self, port: usize, size: i64) -> Option<bool> {
        let limit = self.layout.pfc;
        let q = &mut self.ports[port];
        q.held = q.held.saturating_add_signed(size);
        let stop = q.held > limit || (q.told && q.held > limit / 2);
        (stop != q.told).then(|| {
            q.told = stop;
            q.stats.pauses += u64::from(stop);
            stop
        })
    }

    pub(crate) fn pause(&mut self, port: usize, stop: bool) {
        self.ports[port].paused = stop;
    }
}

/// The place of the `k`th bit that is set.
fn nth(mut mask: u64, k: u32) -> usize {
    for _ in 0..k {
        mask &= mask - 1;
    }
    mask.trailing_zeros() as usize
}

/// The hash of a switch: mixes 64 bits.
pub(crate) fn mix(x: u64) -> u64 {
    let z = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The hash over addresses, protocol and ports.
pub(crate) fn flow_hash(src: u32, dst: u32, source_port: u16, port: u16) -> u64 {
    let a = mix(0x9e37_79b9 ^ u64::from(src) << 32 ^ u64::from(dst));
    mix(a ^ 17 << 32 ^ u64::from(source_port) << 16 ^ u64::from(port))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With a queue that does not move: no mark below the lower bound, all above the upper one, and
    /// in between at distances that are equally probable from 1 to 1 / chance, so that twice as
    /// many are marked as each by itself would be.
    #[test]
    fn red_keeps_marks_apart() {
        let mut rng = Rng::new(1);
        let mut red = Red {
            weight: 0.5,
            average: 0.0,
            count: None,
            draw: 0.0,
        };
        let mut marks = |queue: f64, n: u32| {
            let mut distances = Vec::new();
            let mut since = 0;
            for _ in 0..n {
                since += 1;
                if red.marks(queue, (1000.0, 3000.0), 0.1, &mut rng) {
                    distances.push(since);
                    since = 0;
                }
            }
            distances
        };
        assert!(marks(999.0, 1000).is_empty());
        // The average has to get there first.
        marks(2000.0, 100);
        let some = marks(2000.0, 100_000);
        let longest = some.iter().skip(1).max().copied();
        assert_eq!(longest, Some(20), "chance 0.05");
        let part = some.len() as f64 / 1e5;
        assert!((0.09..0.1).contains(&part), "{part}");
        marks(4000.0, 100);
        assert_eq!(marks(4000.0, 1000).len(), 1000);
        marks(0.0, 100);
        assert!(marks(0.0, 1000).is_empty());
    }
}
