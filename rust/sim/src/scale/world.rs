// SPDX-License-Identifier: GPL-2.0

//! One run: endpoints, fabric and traffic, from the handshakes to the figures.

#![forbid(unsafe_code)]

use super::endpoint::{End, HostSetup, PlaneBy};
use super::fabric::{mix, Fabric, Layout, Node, Ps, ETHERNET, NS};
use super::model::{Model, ModelSetup, Models};
use super::net::{Event, Net, Sums};
use super::packet::Packets;
use super::queue::Queue;
use super::traffic::{Job, Kind, Post, Traffic};
use crate::Rng;
use metaroce::proto::connection::{Connection, Health};

const SECOND: Ps = 1_000_000_000 * NS;

/// Who sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    Metaroce,
    Model(Model),
}

/// Links that a fault concerns.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    pub(crate) at: Ps,
    /// `host 3`, `leaf 0 spine 2`, `spine 2`, `plane 1`; both directions.
    pub(crate) link: Link,
    pub(crate) change: Change,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Link {
    Host {
        host: usize,
        plane: usize,
    },
    Pair {
        plane: usize,
        leaf: usize,
        spine: usize,
    },
    Spine {
        plane: usize,
        spine: usize,
    },
    Plane(usize),
    All,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Change {
    Alive(bool),
    Loss(f64),
    Rate(f64),
}

/// All of a run.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) seed: u64,
    pub(crate) transport: Transport,
    pub(crate) layout: Layout,
    pub(crate) host: HostSetup,
    pub(crate) rto: Ps,
    /// Probability that a packet vanishes behind its host's port.
    pub(crate) loss: f64,
    pub(crate) job: Job,
    pub(crate) qps: usize,
    pub(crate) faults: Vec<Fault>,
    /// Switches learn so much later what has died; 0 is never.
    pub(crate) converge: Ps,
    /// Traffic that does not end: begins to count, and ends.
    pub(crate) warm: Ps,
    pub(crate) time: Ps,
    /// A run that does not end in this time has failed.
    pub(crate) limit: Ps,
    pub(crate) sample: Ps,
}

/// A line of the time series.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sample {
    pub(crate) at: Ps,
    /// Payload bit/s that reached hosts.
    pub(crate) rate: f64,
    /// Longest queue of a switch port, bytes.
    pub(crate) queue: u64,
    pub(crate) dropped: u64,
    pub(crate) marked: u64,
    /// Part of the packets that entered the links that faults concern.
    pub(crate) faulty: f64,
    /// Of the connections of host 0's peers: sum of windows, shares' least and greatest.
    pub(crate) window: u64,
    pub(crate) share_min: u32,
    pub(crate) share_max: u32,
    pub(crate) jain: f64,
}

/// What a run gave.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) ok: bool,
    /// Of iterations, messages or reads, in ps.
    pub(crate) times: Vec<Ps>,
    /// Time that was measured.
    pub(crate) span: Ps,
    /// Payload bytes received in it, by flow.
    pub(crate) received: Vec<u64>,
    pub(crate) last: Vec<Ps>,
    pub(crate) sums: Sums,
    pub(crate) dropped: u64,
    pub(crate) lost: u64,
    pub(crate) marked: u64,
    pub(crate) pauses: u64,
    pub(crate) longest: u64,
    pub(crate) host_longest: u64,
    pub(crate) failed: u64,
    /// Packets that were on their way when it ended.
    pub(crate) left: usize,
    pub(crate) samples: Vec<Sample>,
    pub(crate) cuts: u64,
    pub(crate) spurious: u64,
    pub(crate) path_failed: u64,
    pub(crate) acks: u64,
    pub(crate) senders: Telemetry,
    pub(crate) wall: f64,
}

/// Of the connections that send, over the time that is measured: what the module tells of its
/// own by `metarocedv_query_paths`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Telemetry {
    /// Connections looked at, each as often as there were samples. The next four are sums over
    /// them.
    pub(crate) looks: u64,
    /// Windows and bytes in flight of the good paths.
    pub(crate) window: u64,
    pub(crate) inflight: u64,
    /// kbit/s; 0 is no limit.
    pub(crate) share: u64,
    /// Paths that know their round trip, and the sum of these, ns.
    pub(crate) paths: u64,
    pub(crate) srtt: u64,
    pub(crate) counts: Counts,
    /// Bytes that the links between leaves and spines took, and those of these that faults
    /// concern.
    pub(crate) spines: u64,
    pub(crate) faulty: u64,
}

/// Sums of what connections count.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) sent: u64,
    pub(crate) resent: u64,
    pub(crate) spurious: u64,
    pub(crate) marked: u64,
    pub(crate) cuts: u64,
}

struct World {
    setup: Setup,
    net: Net,
    ends: Vec<End>,
    models: Option<Models>,
    traffic: Traffic,
    posts: Vec<Post>,
    later: Vec<Post>,
    samples: Vec<Sample>,
    sampled: Sums,
    sampled_ports: (u64, u64),
    sampled_faulty: (u64, u64),
    sampled_flows: Vec<u64>,
    counted: Ps,
    delivered_before: u64,
    senders: Telemetry,
    /// What `senders` counts from.
    counts_before: Counts,
    spines_before: (u64, u64),
    over: bool,
}

impl Setup {
    /// Round trip of a full packet between different leaves on an empty network.
    pub(crate) fn base_rtt(&self) -> Ps {
        let l = &self.layout;
        let hops = if l.hosts > l.hosts_per_leaf { 4 } else { 2 };
        let packet = f64::from(self.host.mtu + ETHERNET);
        let line = packet * 8e12 / l.rate;
        2 * hops * l.delay + (line * hops as f64) as Ps
    }

    /// Traffic begins then: connections are up, their paths tried.
    pub(crate) fn start(&self) -> Ps {
        let planes = match self.host.plane_by {
            PlaneBy::Core => 2_000_000 * NS * (self.layout.planes as u64 - 1),
            _ => 0,
        };
        6_000_000 * NS + planes + 16 * (self.base_rtt() + 2 * self.layout.far_delay)
    }

    /// Times of the run, for the progress bar: expected end.
    pub(crate) fn end(&self) -> Ps {
        if self.job.kind.is_finite() {
            self.limit
        } else {
            self.start() + self.warm + self.time
        }
    }
}

/// Runs it. `progress` is called now and then with the simulated time and the events.
pub(crate) fn run(setup: &Setup, progress: &mut dyn FnMut(Ps, u64)) -> Outcome {
    let wall = std::time::Instant::now();
    let mut w = World::new(setup);
    w.connect();
    let start = setup.start();
    w.net.at(start, Event::Phase);
    for i in 0..setup.faults.len() {
        let at = start + setup.faults[i].at;
        w.net.at(at, Event::Fault { index: i as u32 });
    }
    let mut n = 0u64;
    while !w.over {
        let Some((at, event)) = w.net.queue.pop() else {
            break;
        };
        w.net.now = at;
        n += 1;
        if n % (1 << 16) == 0 {
            progress(at, n);
        }
        if at > start + setup.limit {
            break;
        }
        w.handle(event);
        w.notes();
    }
    w.net.sums.events = n;
    w.outcome(wall.elapsed().as_secs_f64())
}

impl World {
    fn new(setup: &Setup) -> Self {
        let mut rng = Rng::new(setup.seed);
        let fabric = Fabric::new(setup.layout.clone(), &mut rng);
        let mut net = Net {
            now: 0,
            queue: Queue::new(),
            fabric,
            packets: Packets::new(),
            rng: Rng::new(rng.next()),
            notes: Vec::with_capacity(64),
            sums: Sums::default(),
            open: Vec::new(),
        };
        let traffic = Traffic::new(&setup.job, &mut rng);
        let loss = (setup.loss * 4_294_967_296.0) as u64;
        if !setup.layout.ideal {
            for h in 0..setup.layout.hosts * setup.layout.planes {
                net.fabric.ports[h].loss = loss;
            }
        }
        let mut ends = Vec::new();
        let mut models = None;
        match setup.transport {
            Transport::Metaroce => {
                let planes = match setup.host.plane_by {
                    PlaneBy::Core => 1,
                    _ => setup.layout.planes,
                };
                let kbit = setup.layout.down_rate * planes as f64 / 1000.0;
                for h in 0..setup.layout.hosts {
                    ends.push(End::new(h as u32, setup.host, kbit as u32, 1024));
                }
            }
            Transport::Model(model) => {
                let m = ModelSetup {
                    model,
                    mtu: setup.host.mtu,
                    rto: setup.rto,
                    rtt: setup.base_rtt(),
                };
                models = Some(Models::new(m, &net));
            }
        }
        let flows = traffic.flows().len();
        Self {
            setup: setup.clone(),
            net,
            ends,
            models,
            traffic,
            posts: Vec::new(),
            later: Vec::new(),
            samples: Vec::new(),
            sampled: Sums::default(),
            sampled_ports: (0, 0),
            sampled_faulty: (0, 0),
            sampled_flows: vec![0; flows],
            counted: 0,
            delivered_before: 0,
            senders: Telemetry::default(),
            counts_before: Counts::default(),
            spines_before: (0, 0),
            over: false,
        }
    }

    fn connect(&mut self) {
        let pairs = self.traffic.pairs();
        if let Some(m) = self.models.as_mut() {
            m.connect_all(&mut self.net, &pairs);
            return;
        }
        let mut both: Vec<(u32, u32)> = pairs.iter().map(|(a, b)| (*a.min(b), *a.max(b))).collect();
        both.sort_unstable();
        both.dedup();
        for (a, b) in both {
            self.ends[a as usize].connect(&mut self.net, b, self.setup.qps);
            self.ends[b as usize].connect(&mut self.net, a, self.setup.qps);
        }
    }

    /// When the host of an event goes on, if it stands still now. It does so in each second at a
    /// moment that is random.
    fn stalled(&self, event: Event) -> Option<Ps> {
        let stall = self.setup.host.stall;
        if stall == 0 || self.counted == 0 {
            return None;
        }
        let f = &self.net.fabric;
        let host = match event {
            Event::Arrive { port, .. } => match f.ports[port as usize].to {
                Node::Host(h) => h,
                _ => return None,
            },
            Event::Batch { host } | Event::Timer { host, .. } => host,
            Event::Nic { port } => port / f.layout.planes as u32,
            _ => return None,
        };
        let period = self.net.now / SECOND;
        let draw = mix(self.setup.seed ^ u64::from(host) << 48 ^ period);
        let begin = period * SECOND + draw % SECOND.saturating_sub(stall).max(1);
        let end = begin + stall;
        (begin..end).contains(&self.net.now).then_some(end)
    }

    fn handle(&mut self, event: Event) {
        if let Some(end) = self.stalled(event) {
            self.net.at(end, event);
            return;
        }
        let Self {
            net, ends, models, ..
        } = self;
        match event {
            Event::Arrive { packet, port } => {
                if let Some(h) = net.arrive(port, packet) {
                    match models {
                        Some(m) => m.receive(net, packet),
                        None => ends[h].receive(net, packet),
                    }
                }
            }
            Event::Left { packet, port } => {
                let idle = net.left(port, packet);
                let hosts = net.fabric.layout.hosts * net.fabric.layout.planes;
                if idle && (port as usize) < hosts {
                    if let Some(m) = models {
                        m.nic(net, port as usize, false);
                    }
                }
            }
            Event::Pause { port, stop } => {
                net.pause(port, stop);
                let hosts = net.fabric.layout.hosts * net.fabric.layout.planes;
                if !stop && (port as usize) < hosts {
                    if let Some(m) = models {
                        m.nic(net, port as usize, false);
                    }
                }
            }
            Event::Batch { host } => ends[host as usize].batch(net),
            Event::Timer { host, conn } => ends[host as usize].timer(net, conn as usize),
            Event::Nic { port } => match models {
                Some(m) => m.nic(net, port as usize, true),
                None => ends[port as usize / net.fabric.layout.planes].nic(net),
            },
            Event::Rto { flow } => {
                if let Some(m) = models {
                    m.rto(net, flow);
                }
            }
            Event::Rate { flow } => {
                if let Some(m) = models {
                    m.rate(net, flow);
                }
            }
            Event::Post { index } => {
                let p = self.later[index as usize];
                self.post(p);
            }
            Event::Fault { index } => self.fault(index as usize),
            Event::Converge => net.fabric.converge(),
            Event::Sample => self.sample(),
            Event::Phase => self.phase(),
        }
    }

    fn post(&mut self, p: Post) {
        self.net.opens(p.tag);
        match self.models.as_mut() {
            Some(m) => m.post(&mut self.net, p.src, p.dst, p.bytes, p.tag),
            None => self.ends[p.src as usize].post(&mut self.net, p.dst, p.bytes, p.tag),
        }
    }

    /// Tells the traffic what happened, and does what it wants.
    fn notes(&mut self) {
        while !self.net.notes.is_empty() {
            let mut notes = std::mem::take(&mut self.net.notes);
            for n in notes.drain(..) {
                self.traffic.on(self.net.now, n, &mut self.posts);
            }
            // Its memory is used again.
            if self.net.notes.is_empty() {
                self.net.notes = notes;
            }
            self.carry_out();
        }
        self.over |= self.traffic.done;
    }

    fn carry_out(&mut self) {
        let mut posts = std::mem::take(&mut self.posts);
        for p in posts.drain(..) {
            if p.at > self.net.now {
                self.later.push(p);
                let index = (self.later.len() - 1) as u32;
                self.net.at(p.at, Event::Post { index });
            } else {
                self.post(p);
            }
        }
        self.posts = posts;
    }

    fn phase(&mut self) {
        let now = self.net.now;
        let start = self.setup.start();
        if self.counted == 0 && now == start {
            if self.models.is_none() && !self.ends.iter().all(|e| e.is_up()) {
                self.over = true;
                return;
            }
            self.counted = start;
            for p in &mut self.net.fabric.ports {
                p.stats = Default::default();
            }
            self.net.sums = Sums {
                packets: self.net.sums.packets,
                ..Sums::default()
            };
            self.measure();
            self.traffic.start(now, &mut self.posts);
            self.carry_out();
            if !self.setup.job.kind.is_finite() {
                self.net.at(start + self.setup.warm, Event::Phase);
            }
            if self.setup.sample != 0 {
                self.net.at(now + self.setup.sample, Event::Sample);
            }
            return;
        }
        if !self.traffic.counting {
            self.traffic.counting = true;
            self.counted = now;
            self.delivered_before = self.net.sums.delivered;
            self.measure();
            self.net.at(now + self.setup.time, Event::Phase);
            return;
        }
        self.over = true;
    }

    fn ports_of(&self, link: Link) -> Vec<usize> {
        let f = &self.net.fabric;
        let l = &f.layout;
        match link {
            Link::Host { host, plane } => vec![f.host_port(host, plane), f.down_port(host, plane)],
            Link::Pair { plane, leaf, spine } => {
                vec![
                    f.leaf_port(plane, leaf, spine),
                    f.spine_port(plane, spine, leaf),
                ]
            }
            Link::Spine { plane, spine } => (0..f.leaves)
                .flat_map(|leaf| {
                    [
                        f.leaf_port(plane, leaf, spine),
                        f.spine_port(plane, spine, leaf),
                    ]
                })
                .collect(),
            Link::Plane(plane) => (0..l.hosts)
                .flat_map(|h| [f.host_port(h, plane), f.down_port(h, plane)])
                .collect(),
            Link::All => (0..f.ports.len()).collect(),
        }
    }

    fn fault(&mut self, i: usize) {
        let fault = self.setup.faults[i].clone();
        for p in self.ports_of(fault.link) {
            let ideal = self.net.fabric.layout.ideal;
            let port = &mut self.net.fabric.ports[p];
            match fault.change {
                Change::Alive(a) => port.alive = a,
                // What loses is not used by who knows it.
                Change::Loss(l) if ideal => port.alive = l < 0.01,
                Change::Loss(l) => port.loss = (l * 4_294_967_296.0) as u64,
                Change::Rate(r) => port.ps_per_byte = 8e12 / r,
            }
        }
        if self.net.fabric.layout.ideal {
            self.net.fabric.converge();
        } else if self.setup.converge != 0 && matches!(fault.change, Change::Alive(_)) {
            let at = self.net.now + self.setup.converge;
            self.net.at(at, Event::Converge);
        }
        if let Some(m) = self.models.as_mut() {
            let n = self.net.fabric.layout.hosts * self.net.fabric.layout.planes;
            for port in 0..n {
                m.nic(&mut self.net, port, false);
            }
        }
    }

    /// The connections that send.
    fn sending(&self) -> impl Iterator<Item = &Connection> {
        let mut pairs = self.traffic.pairs();
        if self.ends.is_empty() {
            pairs.clear();
        }
        pairs.into_iter().filter_map(|(src, dst)| {
            let conns = &self.ends[src as usize].conns;
            conns.iter().find(|c| c.peer == dst).map(|c| &*c.core)
        })
    }

    fn counts(&self) -> Counts {
        self.sending().fold(Counts::default(), |mut sum, core| {
            let n = core.counters();
            sum.sent += n.sent_packets;
            sum.resent += n.retransmits;
            sum.spurious += n.spurious;
            sum.marked += n.ce_echoed;
            sum.cuts += n.window_cuts;
            sum
        })
    }

    /// Bytes over the links between leaves and spines, and over those of them that faults concern.
    fn spine_bytes(&self) -> (u64, u64) {
        let f = &self.net.fabric;
        let first = 2 * f.layout.hosts * f.layout.planes;
        let bytes = |p: &usize| f.ports[*p].stats.bytes;
        let mut faulty = self.faulty_ports();
        faulty.retain(|p| *p >= first);
        let all = (first..f.ports.len()).map(|p| bytes(&p)).sum();
        (all, faulty.iter().map(bytes).sum())
    }

    fn faulty_ports(&self) -> Vec<usize> {
        let faults = self.setup.faults.iter();
        let mut faulty: Vec<usize> = faults.flat_map(|f| self.ports_of(f.link)).collect();
        faulty.sort_unstable();
        faulty.dedup();
        faulty
    }

    /// What is measured begins now.
    fn measure(&mut self) {
        self.senders = Telemetry::default();
        self.counts_before = self.counts();
        self.spines_before = self.spine_bytes();
    }

    /// Looks at the connections that send.
    fn look(&mut self) {
        let mut t = self.senders;
        for core in self.sending() {
            t.looks += 1;
            t.share += u64::from(core.share());
            for p in core.paths().filter(|p| p.health == Health::Good) {
                t.window += u64::from(p.window);
                t.inflight += u64::from(p.inflight);
                t.paths += u64::from(p.srtt != 0);
                t.srtt += p.srtt;
            }
        }
        self.senders = t;
    }

    /// What was seen of them.
    fn telemetry(&self) -> Telemetry {
        let (now, before) = (self.counts(), self.counts_before);
        let (spines, faulty) = self.spine_bytes();
        Telemetry {
            counts: Counts {
                sent: now.sent - before.sent,
                resent: now.resent - before.resent,
                spurious: now.spurious - before.spurious,
                marked: now.marked - before.marked,
                cuts: now.cuts - before.cuts,
            },
            spines: spines - self.spines_before.0,
            faulty: faulty - self.spines_before.1,
            ..self.senders
        }
    }

    fn sample(&mut self) {
        let now = self.net.now;
        if self.traffic.counting {
            self.look();
        }
        let hosts = self.net.fabric.layout.hosts * self.net.fabric.layout.planes;
        let mut s = Sample {
            at: now - self.setup.start(),
            share_min: u32::MAX,
            ..Sample::default()
        };
        let bytes = self.net.sums.delivered - self.sampled.delivered;
        s.rate = bytes as f64 * 8e12 / self.setup.sample as f64;
        self.sampled = self.net.sums;
        let (mut dropped, mut marked) = (0, 0);
        for p in self.net.fabric.ports.iter_mut().skip(hosts) {
            s.queue = s.queue.max(p.stats.recent);
            p.stats.recent = 0;
            dropped += p.stats.dropped;
            marked += p.stats.marked;
        }
        s.dropped = dropped - self.sampled_ports.0;
        s.marked = marked - self.sampled_ports.1;
        self.sampled_ports = (dropped, marked);
        // How much of what goes to the spines takes the links that faults concern.
        let faulty = self.faulty_ports();
        let level = |faulty: &[usize], ports: &[super::fabric::Port]| {
            let part: u64 = faulty.iter().map(|p| ports[*p].stats.bytes).sum();
            part
        };
        let part = level(&faulty, &self.net.fabric.ports);
        let all = self.net.sums.packets;
        let took = part - self.sampled_faulty.0;
        s.faulty = took as f64 * 8e12 / self.setup.sample as f64;
        self.sampled_faulty = (part, all);
        for (i, e) in self.ends.iter().enumerate() {
            for c in &e.conns {
                s.window += c
                    .core
                    .paths()
                    .filter(|p| p.health == Health::Good)
                    .map(|p| u64::from(p.window))
                    .sum::<u64>();
                if i != 0 && c.peer == 0 {
                    let share = c.core.share();
                    s.share_min = s.share_min.min(share);
                    s.share_max = s.share_max.max(share);
                }
            }
        }
        if s.share_min == u32::MAX {
            s.share_min = 0;
        }
        let mut now_flows = self.flow_bytes();
        for (n, before) in now_flows.iter_mut().zip(&mut self.sampled_flows) {
            let d = *n - *before;
            *before = *n;
            *n = d;
        }
        s.jain = jain(&now_flows);
        self.samples.push(s);
        self.net.at(now + self.setup.sample, Event::Sample);
    }

    /// Bytes that have arrived, by flow: what the receiving end counts, where it does.
    fn flow_bytes(&self) -> Vec<u64> {
        let flows = self.traffic.flows();
        if self.models.is_some() || self.setup.job.kind != Kind::Incast {
            return self.traffic.received.clone();
        }
        flows
            .iter()
            .map(|(src, dst)| {
                let e = &self.ends[*dst as usize];
                let c = e.conns.iter().find(|c| c.peer == *src);
                c.map_or(0, |c| c.core.counters().rcvd_bytes)
            })
            .collect()
    }

    fn outcome(mut self, wall: f64) -> Outcome {
        let start = self.setup.start();
        let span = self.net.now - self.counted;
        let hosts = self.net.fabric.layout.hosts * self.net.fabric.layout.planes;
        let left = self.net.packets.used();
        let mut o = Outcome {
            left,
            senders: self.telemetry(),
            ok: self.over && self.traffic.failed == 0 && self.counted != 0,
            times: std::mem::take(&mut self.traffic.times),
            span,
            received: std::mem::take(&mut self.traffic.received),
            last: self
                .traffic
                .last
                .iter()
                .map(|t| t.saturating_sub(start))
                .collect(),
            sums: self.net.sums,
            failed: self.traffic.failed,
            samples: self.samples,
            wall,
            ..Outcome::default()
        };
        o.sums.delivered -= self.delivered_before;
        if self.setup.job.kind.is_finite() {
            o.ok &= self.traffic.done;
        }
        for (i, p) in self.net.fabric.ports.iter().enumerate() {
            o.dropped += p.stats.dropped;
            o.lost += p.stats.lost;
            o.marked += p.stats.marked;
            o.pauses += p.stats.pauses;
            if i < hosts {
                o.host_longest = o.host_longest.max(p.stats.longest);
            } else {
                o.longest = o.longest.max(p.stats.longest);
            }
        }
        for e in &self.ends {
            for c in &e.conns {
                let n = c.core.counters();
                o.cuts += n.window_cuts;
                o.spurious += n.spurious;
                o.path_failed += n.path_failed;
                o.acks += n.acks_sent;
            }
        }
        o
    }
}

/// Jain's index of fairness.
pub(crate) fn jain(values: &[u64]) -> f64 {
    let sum: f64 = values.iter().map(|v| *v as f64).sum();
    let squares: f64 = values.iter().map(|v| (*v as f64).powi(2)).sum();
    if squares == 0.0 {
        return 0.0;
    }
    sum * sum / (values.len() as f64 * squares)
}
