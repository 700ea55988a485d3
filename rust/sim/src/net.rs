// SPDX-License-Identifier: GPL-2.0

#![forbid(unsafe_code)]

use crate::{Datagram, Rng};
use metaroce::proto::api::Time;
use std::collections::HashMap;

/// What IP and UDP add to a packet, and Ethernet.
const OVERHEAD: u64 = 28 + 18;

/// A link in one direction: a queue with a rate, then a delay, then accidents.
#[derive(Clone, Debug)]
pub struct Link {
    /// kbit/s; 0 is infinite.
    pub rate: u64,
    /// Propagation, ns.
    pub delay: Time,
    /// Packets that the queue takes.
    pub limit: usize,
    /// Queue length from which packets are marked; 0 is never.
    pub mark: usize,
    /// Probabilities in millionths.
    pub loss: u32,
    /// Sent twice.
    pub duplicate: u32,
    /// One bit flips.
    pub corrupt: u32,
    /// Delivered at another time, up to `reorder_by` later.
    pub reorder: u32,
    /// See `reorder`.
    pub reorder_by: Time,
    /// Packets larger than this (with IP header) vanish; 0 is no limit.
    pub mtu: usize,
    /// The link works.
    pub alive: bool,
    /// What happened on it.
    pub stats: LinkStats,
    /// Departure times of what is in the queue.
    queue: std::collections::VecDeque<Time>,
    busy_until: Time,
}

/// Counts of a link.
#[derive(Clone, Copy, Debug, Default)]
pub struct LinkStats {
    /// Packets taken.
    pub packets: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Dropped because the queue was full.
    pub overflow: u64,
    /// Lost by accident.
    pub lost: u64,
    /// Marked.
    pub marked: u64,
    /// Longest queue.
    pub longest: usize,
}

impl Link {
    /// A link without accidents.
    pub fn new(rate_kbit: u64, delay: Time) -> Self {
        Self {
            rate: rate_kbit,
            delay,
            limit: 1000,
            mark: 0,
            loss: 0,
            duplicate: 0,
            corrupt: 0,
            reorder: 0,
            reorder_by: 0,
            mtu: 0,
            alive: true,
            stats: LinkStats::default(),
            queue: std::collections::VecDeque::new(),
            busy_until: 0,
        }
    }

    fn send(&mut self, now: Time, mut d: Datagram, rng: &mut Rng, out: &mut Vec<(Time, Datagram)>) {
        let size = d.bytes.len() as u64 + OVERHEAD;
        if !self.alive || (self.mtu != 0 && !d.may_fragment && d.bytes.len() + 28 > self.mtu) {
            self.stats.lost += 1;
            return;
        }
        // Like netem: accidents first, then the queue.
        if rng.chance(self.loss) {
            self.stats.lost += 1;
            return;
        }
        while self.queue.front().is_some_and(|t| *t <= now) {
            self.queue.pop_front();
        }
        if self.rate != 0 && self.queue.len() >= self.limit {
            self.stats.overflow += 1;
            return;
        }
        if self.mark != 0 && self.queue.len() >= self.mark {
            d.ce = true;
            self.stats.marked += 1;
        }
        let departs = match (size * 8_000_000).checked_div(self.rate) {
            None => now,
            Some(time) => {
                let t = self.busy_until.max(now) + time;
                self.busy_until = t;
                self.queue.push_back(t);
                self.stats.longest = self.stats.longest.max(self.queue.len());
                t
            }
        };
        self.stats.packets += 1;
        self.stats.bytes += size;
        if rng.chance(self.corrupt) && !d.bytes.is_empty() {
            let bit = rng.below(d.bytes.len() as u64 * 8);
            d.bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
        }
        let mut arrives = departs + self.delay;
        if rng.chance(self.reorder) {
            arrives += rng.below(self.reorder_by);
        }
        if rng.chance(self.duplicate) {
            out.push((arrives + rng.below(self.delay + 1), d.clone()));
        }
        out.push((arrives, d));
    }
}

/// What is between the hosts: in each direction a link at the host, then one of several
/// parallel links (spines), chosen by a hash of the source port.
pub struct Fabric {
    access: HashMap<(usize, usize), Link>,
    spines: HashMap<(usize, usize), Vec<Link>>,
    last: HashMap<usize, Link>,
    /// Changes the hash.
    pub salt: u64,
    /// The parallel links are those of so many planes, the first plane's first.
    pub planes: usize,
    /// Planes are one network: what leaves on one may arrive on another.
    pub routed: bool,
}

impl Fabric {
    pub(crate) fn new() -> Self {
        Self {
            access: HashMap::new(),
            spines: HashMap::new(),
            last: HashMap::new(),
            salt: 0,
            planes: 1,
            routed: false,
        }
    }

    /// One link in each direction between `a` and `b`.
    pub fn direct(&mut self, a: usize, b: usize, link: &Link) {
        self.spines.insert((a, b), vec![link.clone()]);
        self.spines.insert((b, a), vec![link.clone()]);
    }

    /// `n` parallel links in each direction.
    pub fn spines(&mut self, a: usize, b: usize, n: usize, link: &Link) {
        self.spines.insert((a, b), vec![link.clone(); n]);
        self.spines.insert((b, a), vec![link.clone(); n]);
    }

    /// A common link out of `a` towards `b`, in front of the parallel ones.
    pub fn access(&mut self, a: usize, b: usize, link: &Link) {
        self.access.insert((a, b), link.clone());
    }

    /// A common link towards `b`, behind all others: where incast meets.
    pub fn last_hop(&mut self, b: usize, link: &Link) {
        self.last.insert(b, link.clone());
    }

    /// The link of [`Fabric::last_hop`].
    pub fn last_link(&mut self, b: usize) -> &mut Link {
        self.last.get_mut(&b).expect("no such link")
    }

    /// Link number `i` from `a` to `b`.
    pub fn link(&mut self, a: usize, b: usize, i: usize) -> &mut Link {
        &mut self.spines.get_mut(&(a, b)).expect("no such pair")[i]
    }

    /// Changes all links from `a` to `b`.
    pub fn each(&mut self, a: usize, b: usize, f: impl FnMut(&mut Link)) {
        self.spines
            .get_mut(&(a, b))
            .expect("no such pair")
            .iter_mut()
            .for_each(f);
    }

    /// Lets plane `plane` between two hosts work, or not, in both directions.
    pub fn set_plane(&mut self, a: usize, b: usize, plane: usize, alive: bool) {
        let planes = self.planes;
        for pair in [(a, b), (b, a)] {
            let links = self.spines.get_mut(&pair).expect("no such pair");
            let n = links.len() / planes;
            for l in &mut links[plane * n..(plane + 1) * n] {
                l.alive = alive;
            }
        }
    }

    /// Bytes that went from `a` to `b`, by plane.
    pub fn plane_bytes(&self, a: usize, b: usize) -> Vec<u64> {
        let links = self.spines.get(&(a, b)).expect("no such pair");
        let n = links.len() / self.planes;
        let sum = |l: &[Link]| l.iter().map(|l| l.stats.bytes).sum();
        links.chunks(n).map(sum).collect()
    }

    /// Which of `n` links a port takes.
    pub fn spine_of(&self, port: u16, n: usize) -> usize {
        let mut r = Rng::new(self.salt ^ u64::from(port));
        r.below(n as u64) as usize
    }

    pub(crate) fn send(&mut self, now: Time, d: Datagram, rng: &mut Rng) -> Vec<(Time, Datagram)> {
        let pair = (d.from, d.to);
        let mut first = Vec::with_capacity(2);
        match self.access.get_mut(&pair) {
            Some(l) => l.send(now, d, rng, &mut first),
            None => first.push((now, d)),
        }
        let mut out = Vec::with_capacity(2);
        let salt = self.salt;
        let Some(spines) = self.spines.get_mut(&pair) else {
            return out;
        };
        let n = spines.len() / self.planes;
        for (at, d) in first {
            let (from, to) = (usize::from(d.planes.0), usize::from(d.planes.1));
            if from >= self.planes || (from != to && !self.routed) {
                continue;
            }
            let i = Rng::new(salt ^ u64::from(d.source_port)).below(n as u64) as usize;
            spines[from * n + i].send(at, d, rng, &mut out);
        }
        let Some(last) = self.last.get_mut(&pair.1) else {
            return out;
        };
        let mut end = Vec::with_capacity(2);
        for (at, d) in out {
            last.send(at, d, rng, &mut end);
        }
        end
    }
}
