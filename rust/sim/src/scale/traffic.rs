// SPDX-License-Identifier: GPL-2.0

//! What the endpoints have to do.

#![forbid(unsafe_code)]

use super::fabric::{Ps, NS};
use super::net::Note;
use crate::Rng;

/// A message to be posted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Post {
    pub(crate) at: Ps,
    pub(crate) src: u32,
    pub(crate) dst: u32,
    pub(crate) bytes: u32,
    pub(crate) tag: u32,
}

/// What is to be done.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) kind: Kind,
    pub(crate) hosts: usize,
    pub(crate) hosts_per_leaf: usize,
    /// Bytes: of a rank's buffer (collectives), of a message (others).
    pub(crate) size: u64,
    /// Iterations that count, and those before that do not.
    pub(crate) repeat: u32,
    pub(crate) warm: u32,
    /// Rings (ring all-reduce).
    pub(crate) rings: usize,
    /// Peers to which a rank sends at once (all-to-all); 0 is all.
    pub(crate) peers: usize,
    /// Senders (incast), clients (storage).
    pub(crate) senders: usize,
    /// Messages that a sender keeps outstanding.
    pub(crate) depth: usize,
    /// Servers over which a read is striped.
    pub(crate) stripe: usize,
    /// Ranks and senders begin within this time (ring, all-to-all, incast).
    pub(crate) spread: Ps,
    /// Incast: the first `early` senders begin this long before the others.
    pub(crate) early: usize,
    pub(crate) lead: Ps,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Ring,
    AllToAll,
    Permutation,
    Incast,
    /// Incast without an end: every sender keeps `depth` messages outstanding.
    Stream,
    Storage,
}

impl Kind {
    pub(crate) fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "ring" => Self::Ring,
            "all-to-all" => Self::AllToAll,
            "permutation" => Self::Permutation,
            "incast" => Self::Incast,
            "stream" => Self::Stream,
            "storage" => Self::Storage,
            _ => return None,
        })
    }

    /// It ends by itself.
    pub(crate) fn is_finite(self) -> bool {
        matches!(self, Self::Ring | Self::AllToAll | Self::Incast)
    }
}

/// What a message is part of.
#[derive(Clone, Copy, Debug, Default)]
struct Part {
    src: u32,
    dst: u32,
    bytes: u32,
    posted: Ps,
    /// Ring and step; or the read and whether it asks or answers.
    a: u32,
    b: u32,
}

pub(crate) struct Traffic {
    job: Job,
    parts: Vec<Part>,
    /// Tags that may be used again.
    free: Vec<u32>,
    /// Ranks of each ring, in their order.
    rings: Vec<Vec<u32>>,
    place: Vec<Vec<u32>>,
    /// Flows: source and destination.
    flows: Vec<(u32, u32)>,
    left: u64,
    iteration: u32,
    began: Ps,
    reads: Vec<(Ps, u32, u32)>,
    free_reads: Vec<u32>,
    rng: Rng,
    // Results.
    /// Times of iterations that count, or of messages or reads.
    pub(crate) times: Vec<Ps>,
    /// Bytes received by flow, and when the last of them came.
    pub(crate) received: Vec<u64>,
    pub(crate) last: Vec<Ps>,
    pub(crate) counting: bool,
    pub(crate) failed: u64,
    pub(crate) done: bool,
}

impl Traffic {
    pub(crate) fn new(job: &Job, rng: &mut Rng) -> Self {
        let n = job.hosts as u32;
        let mut flows = Vec::new();
        let mut rings = Vec::new();
        match job.kind {
            Kind::Ring => {
                for _ in 0..job.rings {
                    let order = shuffled(n, rng);
                    for (i, a) in order.iter().enumerate() {
                        flows.push((*a, order[(i + 1) % order.len()]));
                    }
                    rings.push(order);
                }
            }
            Kind::AllToAll => {
                for step in 1..n {
                    for a in 0..n {
                        flows.push((a, (a + step) % n));
                    }
                }
            }
            Kind::Permutation => {
                // Everybody's partner is behind another leaf, where there is one.
                let shift = if job.hosts > job.hosts_per_leaf {
                    job.hosts_per_leaf as u32
                } else {
                    1
                };
                let order = shuffled(job.hosts_per_leaf.min(job.hosts) as u32, rng);
                for a in 0..n {
                    let b = (a + shift) % n;
                    let size = order.len() as u32;
                    let b = b / size * size + order[(b % size) as usize];
                    let b = if b >= n { (a + shift) % n } else { b };
                    flows.push((a, b));
                }
                if job.hosts % job.hosts_per_leaf != 0 || job.hosts <= job.hosts_per_leaf {
                    flows = (0..n).map(|a| (a, (a + shift) % n)).collect();
                }
            }
            Kind::Incast | Kind::Stream => {
                for a in 1..=job.senders as u32 {
                    flows.push((a, 0));
                }
            }
            Kind::Storage => {
                let clients = job.senders as u32;
                for c in 0..clients {
                    for s in clients..n {
                        flows.push((c, s));
                        flows.push((s, c));
                    }
                }
            }
        }
        let place = rings
            .iter()
            .map(|order| {
                let mut place = vec![0; order.len()];
                for (i, a) in order.iter().enumerate() {
                    place[*a as usize] = i as u32;
                }
                place
            })
            .collect();
        let count = flows.len();
        Self {
            job: job.clone(),
            parts: Vec::new(),
            free: Vec::new(),
            rings,
            place,
            flows,
            left: 0,
            iteration: 0,
            began: 0,
            reads: Vec::new(),
            free_reads: Vec::new(),
            rng: Rng::new(rng.next()),
            times: Vec::new(),
            received: vec![0; count],
            last: vec![0; count],
            counting: job.kind.is_finite(),
            failed: 0,
            done: false,
        }
    }

    /// Pairs that talk, each once in each direction.
    pub(crate) fn pairs(&self) -> Vec<(u32, u32)> {
        let mut pairs = self.flows.clone();
        pairs.sort_unstable();
        pairs.dedup();
        pairs
    }

    pub(crate) fn flows(&self) -> &[(u32, u32)] {
        &self.flows
    }

    fn tag(&mut self, part: Part) -> u32 {
        match self.free.pop() {
            Some(t) => {
                self.parts[t as usize] = part;
                t
            }
            None => {
                self.parts.push(part);
                (self.parts.len() - 1) as u32
            }
        }
    }

    fn post(&mut self, at: Ps, part: Part, out: &mut Vec<Post>) {
        let part = Part { posted: at, ..part };
        let tag = self.tag(part);
        out.push(Post {
            at,
            src: part.src,
            dst: part.dst,
            bytes: part.bytes,
            tag,
        });
    }

    /// Begins.
    pub(crate) fn start(&mut self, now: Ps, out: &mut Vec<Post>) {
        self.began = now;
        let skew: Vec<Ps> = match self.job.kind {
            Kind::Ring | Kind::AllToAll => (0..self.job.hosts)
                .map(|_| now + self.rng.below(self.job.spread.max(1)))
                .collect(),
            _ => Vec::new(),
        };
        match self.job.kind {
            Kind::Ring => {
                let n = self.job.hosts as u64;
                let chunk = self.chunk();
                self.left = self.rings.len() as u64 * n * 2 * (n - 1);
                for r in 0..self.rings.len() {
                    for i in 0..n as usize {
                        let order = &self.rings[r];
                        let part = Part {
                            src: order[i],
                            dst: order[(i + 1) % n as usize],
                            bytes: chunk,
                            a: r as u32,
                            b: 0,
                            posted: now,
                        };
                        self.post(skew[part.src as usize], part, out);
                    }
                }
            }
            Kind::AllToAll => {
                let bytes = self.chunk();
                self.left = self.flows.len() as u64;
                let most = match self.job.peers {
                    0 => usize::MAX,
                    n => n * self.job.hosts,
                };
                for i in 0..self.flows.len().min(most) {
                    self.exchange(skew[self.flows[i].0 as usize], i, bytes, out);
                }
            }
            Kind::Permutation | Kind::Stream => {
                for i in 0..self.flows.len() {
                    for _ in 0..self.job.depth {
                        self.message(now, i, out);
                    }
                }
            }
            Kind::Incast => {
                self.left = self.flows.len() as u64;
                for i in 0..self.flows.len() {
                    let wait = if i < self.job.early {
                        0
                    } else {
                        self.job.lead + self.rng.below(self.job.spread.max(1))
                    };
                    self.message(now + wait, i, out);
                }
            }
            Kind::Storage => {
                for c in 0..self.job.senders {
                    for _ in 0..self.job.depth {
                        self.read(now, c as u32, out);
                    }
                }
            }
        }
    }

    /// A rank's message to one peer of an all-to-all.
    fn exchange(&mut self, at: Ps, flow: usize, bytes: u32, out: &mut Vec<Post>) {
        let (src, dst) = self.flows[flow];
        let part = Part {
            src,
            dst,
            bytes,
            a: flow as u32,
            ..Part::default()
        };
        self.post(at, part, out);
    }

    fn chunk(&self) -> u32 {
        let n = self.job.hosts as u64 * self.rings.len().max(1) as u64;
        (self.job.size / n).max(1) as u32
    }

    fn message(&mut self, now: Ps, flow: usize, out: &mut Vec<Post>) {
        let (src, dst) = self.flows[flow];
        let part = Part {
            src,
            dst,
            bytes: self.job.size as u32,
            a: flow as u32,
            ..Part::default()
        };
        self.post(now, part, out);
    }

    /// A client asks `stripe` servers for their parts of a block.
    fn read(&mut self, now: Ps, client: u32, out: &mut Vec<Post>) {
        let servers = self.job.hosts - self.job.senders;
        let n = self.job.stripe.min(servers);
        let first = self.rng.below(servers as u64) as usize;
        let read = (now, n as u32, client);
        let id = match self.free_reads.pop() {
            Some(id) => {
                self.reads[id as usize] = read;
                id
            }
            None => {
                self.reads.push(read);
                (self.reads.len() - 1) as u32
            }
        };
        for i in 0..n {
            let server = self.job.senders + (first + i) % servers;
            let part = Part {
                src: client,
                dst: server as u32,
                bytes: 64,
                a: id,
                b: 0,
                ..Part::default()
            };
            self.post(now, part, out);
        }
    }

    /// Something happened.
    pub(crate) fn on(&mut self, now: Ps, note: Note, out: &mut Vec<Post>) {
        let tag = match note {
            Note::Received { tag } => tag,
            Note::Sent => return,
            Note::Failed => {
                self.failed += 1;
                return;
            }
        };
        let part = self.parts[tag as usize];
        self.free.push(tag);
        match self.job.kind {
            Kind::Ring => self.ring_step(now, part, out),
            Kind::AllToAll => {
                self.count(now, part.a as usize, part);
                // The rank goes on to its next peer.
                let next = part.a as usize + self.job.peers * self.job.hosts;
                if self.job.peers != 0 && next < self.flows.len() {
                    self.exchange(now, next, part.bytes, out);
                }
                self.one_less(now, out);
            }
            Kind::Permutation | Kind::Stream => {
                self.count(now, part.a as usize, part);
                self.message(now, part.a as usize, out);
            }
            Kind::Incast => {
                self.count(now, part.a as usize, part);
                self.left -= 1;
                self.done = self.left == 0;
            }
            Kind::Storage => self.storage(now, part, out),
        }
    }

    fn count(&mut self, now: Ps, flow: usize, part: Part) {
        if self.counting {
            self.received[flow] += u64::from(part.bytes);
            self.last[flow] = now;
            if self.job.kind != Kind::AllToAll {
                self.times.push(now - part.posted);
            }
        }
    }

    fn ring_step(&mut self, now: Ps, part: Part, out: &mut Vec<Post>) {
        let n = self.job.hosts as u32;
        let r = part.a as usize;
        let i = self.place[r][part.dst as usize] as usize;
        let flow = r * n as usize + self.place[r][part.src as usize] as usize;
        self.received[flow] += u64::from(part.bytes);
        self.last[flow] = now;
        if part.b + 1 < 2 * (n - 1) {
            let order = &self.rings[r];
            let next = Part {
                src: part.dst,
                dst: order[(i + 1) % order.len()],
                b: part.b + 1,
                ..part
            };
            self.post(now, next, out);
        }
        self.one_less(now, out);
    }

    /// A message of an iteration is done.
    fn one_less(&mut self, now: Ps, out: &mut Vec<Post>) {
        self.left -= 1;
        if self.left != 0 {
            return;
        }
        self.iteration += 1;
        if self.iteration > self.job.warm {
            self.times.push(now - self.began);
        }
        if self.iteration >= self.job.warm + self.job.repeat {
            self.done = true;
        } else {
            // What a barrier takes.
            self.start(now + 5_000 * NS, out);
        }
    }

    fn storage(&mut self, now: Ps, part: Part, out: &mut Vec<Post>) {
        if part.b == 0 {
            let n = self.job.stripe.min(self.job.hosts - self.job.senders) as u64;
            let part = Part {
                src: part.dst,
                dst: part.src,
                bytes: (self.job.size / n).max(1) as u32,
                b: 1,
                ..part
            };
            self.post(now, part, out);
            return;
        }
        let id = part.a as usize;
        if self.counting {
            let (c, s) = (part.dst as usize, part.src as usize - self.job.senders);
            let flow = 2 * (c * (self.job.hosts - self.job.senders) + s) + 1;
            self.received[flow] += u64::from(part.bytes);
            self.last[flow] = now;
        }
        self.reads[id].1 -= 1;
        let (began, left, client) = self.reads[id];
        if left == 0 {
            if self.counting {
                self.times.push(now - began);
            }
            self.free_reads.push(part.a);
            self.read(now, client, out);
        }
    }
}

fn shuffled(n: u32, rng: &mut Rng) -> Vec<u32> {
    let mut v: Vec<u32> = (0..n).collect();
    for i in (1..v.len()).rev() {
        v.swap(i, rng.below(i as u64 + 1) as usize);
    }
    v
}
