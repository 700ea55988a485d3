// SPDX-License-Identifier: GPL-2.0

//! A host with the real core: what the kernel driver does around it, but for the bytes.

#![forbid(unsafe_code)]

use super::fabric::{flow_hash, Ps, ETHERNET, NS};
use super::net::{Event, Net, Note};
use super::packet::Kind;
use metaroce::proto::api::{
    self, Payload, Placed, Placement, Receive, RxInfo, SendWr, Status, StreamId, Target, Time,
    Transmit, WrOp,
};
use metaroce::proto::congestion::{Controller, Shares};
use metaroce::proto::connection::{
    stateless_reply, Config, Connection, ConnectionState, Ids, PlaneInfo, PlaneState,
};
use metaroce::proto::stream::{State, Stream, StreamAttr};
use metaroce::proto::wire::{HandshakeKey, Packet, PlaneAddress};
use std::collections::{HashMap, VecDeque};

/// The service port.
const PORT: u16 = 4795;

/// IPv4 and UDP headers.
const IP_UDP: u32 = 28;

/// Where the core's clock begins.
const EPOCH: Time = 1_000_000_000;

/// WRs of a QP.
const DEPTH: u32 = 64;

/// Held packets of a host at the most, as the driver has it for a connection.
const HELD: usize = 256;

/// Who chooses the plane of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PlaneBy {
    /// The host's routes, by the hash over addresses and ports.
    Hash,
    /// The driver, by the number of the path.
    Path,
    /// The core: a plane is a device of its own, with an address.
    Core,
}

/// How hosts behave.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostSetup {
    pub(crate) mtu: u32,
    pub(crate) paths: u8,
    pub(crate) controller: Controller,
    /// Outstanding packets of a path at first and at the most.
    pub(crate) records: u16,
    /// The receiver's share is told.
    pub(crate) hint: bool,
    /// Packets that come within this time are handled together.
    pub(crate) batch: Ps,
    /// A host does nothing for so long, once in each second.
    pub(crate) stall: Ps,
    pub(crate) margin: Time,
    /// Time that hosts need for batching, of which a share makes allowance.
    pub(crate) batching: Time,
    /// Bytes in a host's port above which connections wait for their turn; 0: they do not
    /// wait, and what finds the port full has not been sent.
    pub(crate) pull: u64,
    pub(crate) plane_by: PlaneBy,
    /// Planes of a host.
    pub(crate) planes: usize,
    /// Packets of a connection before the next one's turn, while others wait.
    pub(crate) turn: usize,
    pub(crate) seed: u64,
}

pub(crate) struct Conn {
    pub(crate) core: Box<Connection>,
    pub(crate) peer: u32,
    armed: Ps,
    dirty: bool,
    waiting: bool,
    /// Planes that the core takes to be full.
    full: u32,
    streams: Vec<StreamId>,
    next_stream: usize,
    /// Messages that do not fit into the send queues yet.
    backlog: VecDeque<(u32, u32)>,
    /// WRs outstanding, by stream.
    open: Vec<VecDeque<u32>>,
    /// By stream: the next WR to be done and the next receive.
    next_wr: Vec<u32>,
    next_rmsn: Vec<u32>,
}

pub(crate) struct End {
    index: u32,
    setup: HostSetup,
    config: Config,
    pub(crate) conns: Vec<Conn>,
    peers: HashMap<u32, u32>,
    /// Of each plane, or of the line.
    pub(crate) shares: Vec<Shares>,
    dirty: Vec<u32>,
    in_batch: bool,
    held: usize,
    waiting: VecDeque<u32>,
    nic_armed: bool,
    tx: Box<Transmit>,
    next_qpn: u32,
}

/// IPv4 address of a host on a plane, and its GID.
fn address(i: u32, plane: u32) -> u32 {
    0x0a00_0001 + (plane << 20) + i
}

fn gid(i: u32) -> [u8; 16] {
    gid_on(i, 0)
}

fn gid_on(i: u32, plane: u32) -> [u8; 16] {
    let mut g = [0; 16];
    g[10] = 0xff;
    g[11] = 0xff;
    g[12..].copy_from_slice(&address(i, plane).to_be_bytes());
    g
}

fn clock(now: Ps) -> Time {
    now / NS + EPOCH
}

struct Answers {
    held: usize,
}

impl api::Host for Answers {
    fn bind_receive(&mut self, _: StreamId, _: u32) -> Option<u64> {
        Some(1 << 31)
    }

    fn receives_posted(&mut self, _: StreamId) -> Option<u32> {
        None
    }

    fn may_hold(&mut self, _: u32) -> bool {
        self.held < HELD
    }
}

/// Nothing is written to a message that is complete.
fn check(net: &Net, p: &Placement) {
    if let Target::Remote { va, .. } = p.target {
        let open = net.open.get((va >> 32) as usize) == Some(&true);
        assert!(open, "written to after completion");
    }
}

impl Conn {
    fn stream(&self, id: StreamId) -> usize {
        let q = self.streams.iter().position(|s| *s == id);
        q.expect("a stream of this connection")
    }
}

impl End {
    pub(crate) fn new(index: u32, setup: HostSetup, kbit: u32, senders: usize) -> Self {
        let mut rng = crate::Rng::new(setup.seed ^ u64::from(index) << 32);
        let mut config = Config::new(setup.mtu);
        config.paths = setup.paths;
        config.controller = setup.controller;
        config.path_records = setup.records;
        config.margin = setup.margin;
        config.batching = setup.batching;
        config.instance = rng.next();
        config.seed = rng.next();
        for b in &mut config.secret {
            *b = rng.next() as u8;
        }
        let lines = match (setup.hint, setup.plane_by) {
            (false, _) => 0,
            (true, PlaneBy::Core) => setup.planes,
            (true, _) => 1,
        };
        let shares = (0..lines)
            .map(|_| Shares::new(kbit, senders).expect("memory"))
            .collect();
        Self {
            index,
            setup,
            config,
            conns: Vec::new(),
            peers: HashMap::new(),
            shares,
            dirty: Vec::new(),
            in_batch: false,
            held: 0,
            waiting: VecDeque::new(),
            nic_armed: false,
            tx: Box::new(Transmit::new()),
            next_qpn: 1,
        }
    }

    /// Makes the connection to a peer and its QPs; both ends number them alike. Gives the
    /// first QP number.
    pub(crate) fn connect(&mut self, net: &mut Net, peer: u32, qps: usize) {
        let now = clock(net.now);
        let i = self.conns.len();
        let cid = (net.rng.next() << 24) | i as u64;
        let ids = Ids {
            local_cid: cid,
            local_gid: gid(self.index),
            remote_gid: gid(peer),
            dscp: 0,
        };
        let mut core = Connection::new(&self.config, ids, now).expect("memory");
        if self.by_core() {
            let planes: Vec<PlaneAddress> = (0..self.setup.planes)
                .map(|p| PlaneAddress {
                    id: p as u8,
                    draining: false,
                    gid: gid_on(self.index, p as u32),
                })
                .collect();
            let memory = Connection::plane_memory().expect("memory");
            drop(core.allow_planes(memory));
            core.set_planes(now, &planes);
        }
        self.peers.insert(peer, i as u32);
        self.conns.push(Conn {
            core: Box::new(core),
            peer,
            armed: Ps::MAX,
            dirty: false,
            waiting: false,
            full: 0,
            streams: Vec::new(),
            next_stream: 0,
            backlog: VecDeque::new(),
            open: (0..qps).map(|_| VecDeque::new()).collect(),
            next_wr: vec![0; qps],
            next_rmsn: vec![0; qps],
        });
        for q in 0..qps as u32 {
            let mut stream = Stream::new(DEPTH, 1).expect("memory");
            let (local, remote) = (peer * 64 + q + 1, self.index * 64 + q + 1);
            self.next_qpn += 1;
            stream.set_attr(&StreamAttr {
                local_qpn: local,
                remote_qpn: remote,
                sq_psn: local * 7,
                rq_psn: remote * 7,
                max_rd_atomic: 1,
                max_dest_rd_atomic: 1,
                timeout: 500_000_000,
                retry_cnt: 7,
                rnr_retry: 7,
                min_rnr_timer_us: 100,
                payload_mtu: 1024,
                window: 4096,
            });
            let core = &mut self.conns[i].core;
            let spare = Connection::spare(core.wanted_slots()).expect("memory");
            let Ok((id, _)) = core.attach(now, stream, spare) else {
                panic!("attach refused");
            };
            core.set_state(now, id, State::Rtr);
            core.set_state(now, id, State::Rts);
            self.conns[i].streams.push(id);
        }
        self.pump(net, i);
    }

    /// All connections are up, on all their planes.
    pub(crate) fn is_up(&self) -> bool {
        let planes = if self.by_core() { self.setup.planes } else { 1 };
        self.conns.iter().all(|c| {
            let works = |p: &PlaneInfo| p.state == PlaneState::Working;
            c.core.state() == ConnectionState::Up && c.core.planes().filter(works).count() == planes
        })
    }

    /// Planes are the core's matter.
    fn by_core(&self) -> bool {
        self.setup.plane_by == PlaneBy::Core && self.setup.planes > 1
    }

    /// A message of `bytes` to `peer`.
    pub(crate) fn post(&mut self, net: &mut Net, peer: u32, bytes: u32, tag: u32) {
        let c = self.peers[&peer] as usize;
        self.conns[c].backlog.push_back((bytes, tag));
        self.feed(net, c);
        self.pump(net, c);
    }

    /// Posts what fits into the send queues.
    fn feed(&mut self, net: &Net, c: usize) {
        let now = clock(net.now);
        let c = &mut self.conns[c];
        while let Some(&(bytes, tag)) = c.backlog.front() {
            let n = c.streams.len();
            let Some(q) = (0..n)
                .map(|i| (c.next_stream + i) % n)
                .find(|q| c.open[*q].len() < DEPTH as usize)
            else {
                return;
            };
            c.next_stream = (q + 1) % n;
            let wr = SendWr {
                op: WrOp::WriteImm {
                    va: u64::from(tag) << 32,
                    rkey: 1,
                    imm: tag,
                },
                fence: false,
                solicited: false,
                signaled: true,
                length: bytes,
                error: None,
            };
            c.core
                .post_send(now, c.streams[q], wr)
                .expect("room in the send queue");
            c.open[q].push_back(tag);
            c.backlog.pop_front();
        }
    }

    /// A packet has arrived.
    pub(crate) fn receive(&mut self, net: &mut Net, id: u32) {
        let now = clock(net.now);
        let p = net.packets.get(id);
        let (src, sport) = (p.src, p.psn as u16);
        let Ok(packet) = Packet::parse(&p.header[..usize::from(p.header_len)]) else {
            panic!("a header that was made cannot be read");
        };
        let conn = match packet.connection_id() {
            Some(cid) => {
                let i = (cid & 0xff_ffff) as usize;
                self.conns
                    .get(i)
                    .is_some_and(|c| c.core.ids().local_cid == cid)
                    .then_some(i)
            }
            None => self.peers.get(&src).map(|i| *i as usize),
        };
        let Some(c) = conn else {
            let seen = HandshakeKey {
                source: gid(src),
                destination: gid(self.index),
                dscp: 0,
            };
            let secret = self.config.secret;
            let answer = stateless_reply(&packet, &seen, &secret, now, &mut self.tx);
            net.packets.free(id);
            if answer {
                self.tx.source_port = sport;
                self.emit(net, None, src);
            }
            return;
        };
        let info = RxInfo {
            ce: p.ce,
            plane: p.plane as u8,
            payload_len: p.payload,
        };
        let mut host = Answers { held: self.held };
        let core = &mut self.conns[c].core;
        match core.receive(now, &packet, &info, &mut host) {
            Ok(Receive::Place(p)) => {
                check(net, &p);
                net.sums.delivered += u64::from(p.len);
                core.placed(now, p.token, Placed::Ok, &mut host);
            }
            Ok(Receive::Hold(p)) => {
                net.sums.delivered += u64::from(p.len);
                self.held += 1;
                assert!(self.held <= HELD, "what is held has a limit");
            }
            _ => {}
        }
        net.packets.free(id);
        if !self.conns[c].dirty {
            self.conns[c].dirty = true;
            self.dirty.push(c as u32);
        }
        if !self.in_batch {
            self.work(net);
            self.arm_batch(net);
        }
    }

    fn arm_batch(&mut self, net: &mut Net) {
        self.in_batch = true;
        let host = self.index;
        net.at(net.now + self.setup.batch, Event::Batch { host });
    }

    /// Time to look at what came in.
    pub(crate) fn batch(&mut self, net: &mut Net) {
        if self.dirty.is_empty() {
            self.in_batch = false;
            return;
        }
        self.work(net);
        self.arm_batch(net);
    }

    fn work(&mut self, net: &mut Net) {
        let now = clock(net.now);
        let mut dirty = std::mem::take(&mut self.dirty);
        for &c in &dirty {
            let i = c as usize;
            self.conns[i].dirty = false;
            let core = &mut self.conns[i].core;
            core.end_of_batch(now);
            if core.report_is_due(now) {
                for (plane, shares) in self.shares.iter_mut().enumerate() {
                    core.report_on(now, plane as u8, shares);
                }
            }
            self.pump(net, i);
        }
        dirty.clear();
        self.dirty = dirty;
    }

    pub(crate) fn timer(&mut self, net: &mut Net, c: usize) {
        let conn = &mut self.conns[c];
        if conn.armed > net.now {
            return;
        }
        conn.armed = Ps::MAX;
        conn.core.handle_timeout(clock(net.now));
        self.pump(net, c);
    }

    /// The port has room: those that wait send in turn.
    pub(crate) fn nic(&mut self, net: &mut Net) {
        self.nic_armed = false;
        // With several planes each once: it may have to wait for another one.
        let most = if self.by_core() {
            self.waiting.len()
        } else {
            usize::MAX
        };
        for _ in 0..most {
            if self.is_full(net) {
                break;
            }
            let Some(c) = self.waiting.pop_front() else {
                break;
            };
            self.conns[c as usize].waiting = false;
            self.pump(net, c as usize);
        }
        if !self.waiting.is_empty() {
            self.arm_nic(net);
        }
    }

    /// Whether connections have to wait for the port.
    fn is_full(&self, net: &Net) -> bool {
        if self.by_core() {
            return self.setup.pull != 0 && self.full_planes(net) == (1 << self.setup.planes) - 1;
        }
        self.setup.pull != 0 && self.backlog(net) >= self.setup.pull
    }

    /// Planes whose ports have enough to do, a bit each.
    fn full_planes(&self, net: &Net) -> u32 {
        let f = &net.fabric;
        let full = |p: &usize| {
            f.ports[f.host_port(self.index as usize, *p)].backlog(net.now) >= self.setup.pull
        };
        (0..self.setup.planes)
            .filter(full)
            .fold(0, |m, p| m | 1 << p)
    }

    /// Tells the core which planes are full.
    fn tell_full(&mut self, net: &Net, c: usize) -> u32 {
        if self.setup.pull == 0 || !self.by_core() {
            return 0;
        }
        let full = self.full_planes(net);
        let conn = &mut self.conns[c];
        let changed = full ^ conn.full;
        conn.full = full;
        for p in (0..self.setup.planes).filter(|p| changed & 1 << p != 0) {
            conn.core.plane_full(p as u8, full & 1 << p != 0);
        }
        full
    }

    /// Bytes in the host's ports, on average.
    fn backlog(&self, net: &Net) -> u64 {
        let f = &net.fabric;
        let n = f.layout.planes;
        let sum: u64 = (0..n)
            .map(|p| f.ports[f.host_port(self.index as usize, p)].backlog(net.now))
            .sum();
        sum / n as u64
    }

    fn wait(&mut self, net: &mut Net, c: usize) {
        if !self.conns[c].waiting {
            self.conns[c].waiting = true;
            self.waiting.push_back(c as u32);
        }
        self.arm_nic(net);
    }

    fn arm_nic(&mut self, net: &mut Net) {
        if !self.nic_armed {
            self.nic_armed = true;
            let f = &net.fabric;
            let port = f.host_port(self.index as usize, 0);
            // When half of it has gone, of the first that is full.
            let half = self.setup.pull / 2;
            let time = |p: usize, bytes: u64| {
                let bytes = bytes.saturating_sub(half) as u32;
                f.ports[p].line_time(bytes).max(NS)
            };
            let wait = if self.by_core() {
                let full = self.full_planes(net);
                (0..self.setup.planes)
                    .filter(|p| full & 1 << p != 0)
                    .map(|p| f.host_port(self.index as usize, p))
                    .map(|p| time(p, f.ports[p].backlog(net.now)))
                    .min()
                    .unwrap_or(NS)
            } else {
                time(port, self.backlog(net))
            };
            net.at(net.now + wait, Event::Nic { port: port as u32 });
        }
    }

    /// Events out, packets out, timer.
    fn pump(&mut self, net: &mut Net, c: usize) {
        let now = clock(net.now);
        loop {
            let mut busy = false;
            while let Some(e) = self.conns[c].core.poll_event(now) {
                busy = true;
                self.event(net, c, e);
            }
            let mut turn = 0;
            loop {
                if self.is_full(net) {
                    self.wait(net, c);
                    break;
                }
                if turn >= self.setup.turn && !self.waiting.is_empty() {
                    self.wait(net, c);
                    break;
                }
                let full = self.tell_full(net, c);
                if !self.conns[c].core.poll_transmit(now, &mut self.tx) {
                    if full != 0 {
                        self.wait(net, c);
                    }
                    break;
                }
                busy = true;
                turn += 1;
                let peer = self.conns[c].peer;
                if !self.emit(net, Some(c), peer) {
                    net.sums.refused += 1;
                    self.conns[c].core.transmit_failed(now, &self.tx);
                }
            }
            if !busy || self.conns[c].waiting {
                break;
            }
        }
        let conn = &mut self.conns[c];
        if let Some(n) = conn.core.wants_records() {
            let more = Connection::record_memory(conn.core.path_count(), n).expect("memory");
            drop(conn.core.use_records(more));
        }
        let Some(t) = conn.core.wake_at(now) else {
            return;
        };
        if conn.waiting && t <= now {
            return;
        }
        let at = t.max(now + 1).saturating_sub(EPOCH).saturating_mul(NS);
        if at < conn.armed {
            conn.armed = at;
            let (host, conn) = (self.index, c as u32);
            net.at(at, Event::Timer { host, conn });
        }
    }

    fn event(&mut self, net: &mut Net, c: usize, e: api::Event) {
        let now = clock(net.now);
        match e {
            api::Event::SendDone { stream, status, wr } => {
                let conn = &mut self.conns[c];
                let q = conn.stream(stream);
                assert_eq!(wr, conn.next_wr[q], "WRs are done in order");
                conn.next_wr[q] += 1;
                let open = conn.open[q].pop_front();
                assert!(open.is_some(), "every WR is done once");
                if status == Status::Success {
                    net.notes.push(Note::Sent);
                } else {
                    net.notes.push(Note::Failed);
                }
                self.feed(net, c);
            }
            api::Event::RecvDone {
                stream,
                rmsn,
                imm,
                status,
                ..
            } => {
                assert_eq!(status, Status::Success);
                let conn = &mut self.conns[c];
                let q = conn.stream(stream);
                assert_eq!(rmsn, conn.next_rmsn[q], "receives are done in order");
                conn.next_rmsn[q] += 1;
                net.received(imm);
            }
            api::Event::Release(p) => {
                check(net, &p);
                self.held -= 1;
                let mut host = Answers { held: self.held };
                let core = &mut self.conns[c].core;
                core.placed(now, p.token, Placed::Ok, &mut host);
            }
            api::Event::Discard(_) => self.held -= 1,
            api::Event::StreamError { stream, .. } => {
                self.conns[c].core.set_state(now, stream, State::Err);
            }
            _ => {}
        }
    }

    /// Sends what is in `tx`; false when the port is full.
    fn emit(&mut self, net: &mut Net, c: Option<usize>, peer: u32) -> bool {
        let tx = &self.tx;
        let (local, remote) = match c.filter(|_| self.by_core()) {
            Some(c) => {
                let plane = self.conns[c].core.plane(tx.plane);
                let p = plane.expect("a plane that is there");
                (usize::from(p.local), u32::from(p.remote))
            }
            None => (0, 0),
        };
        let payload = match tx.payload {
            Payload::None => 0,
            Payload::Send { len, .. } | Payload::Read { len, .. } | Payload::Pad { len } => len,
        };
        let from = address(self.index, local as u32);
        let hash = flow_hash(from, address(peer, remote), tx.source_port, PORT);
        let size = u32::from(tx.header_len) + payload + IP_UDP + ETHERNET;
        let port = match self.setup.plane_by {
            PlaneBy::Path => {
                let plane = usize::from(tx.path) % net.fabric.layout.planes;
                net.fabric.host_port(self.index as usize, plane)
            }
            PlaneBy::Hash => net.host_port(self.index as usize, hash),
            PlaneBy::Core if local as u32 != remote => return true,
            PlaneBy::Core => net.fabric.host_port(self.index as usize, local),
        };
        let q = &net.fabric.ports[port];
        if q.backlog(net.now) + u64::from(size) > q.limit {
            return false;
        }
        if tx.resend {
            net.sums.resent += 1;
        }
        let id = net.packets.take();
        let p = net.packets.get_mut(id);
        p.src = self.index;
        p.dst = peer;
        p.kind = Kind::Real;
        p.payload = payload;
        p.size = size;
        p.hash = hash;
        p.psn = u64::from(tx.source_port);
        p.header_len = tx.header_len;
        let n = usize::from(tx.header_len);
        p.header[..n].copy_from_slice(&tx.header[..n]);
        net.leave(port, id);
        true
    }
}
