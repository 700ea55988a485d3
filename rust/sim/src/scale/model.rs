// SPDX-License-Identifier: GPL-2.0

//! Models of other transports, to compare with: RoCEv2 with go-back-N and DCQCN, selective
//! repeat on one path, and an ideal one. They see both ends at once; only what the wire
//! would carry is sent.
//!
//! | model | sends | loss | rate |
//! | --- | --- | --- | --- |
//! | go-back-N | one port per flow | NAK, all from there again; timer | DCQCN |
//! | selective | one port per flow | what an acknowledgement passes over, alone; timer | a window of one bandwidth-delay product, cut by marks as DCTCP does |
//! | ideal | each packet where the queue is shortest | none happens | the line's; nothing is acknowledged |
//!
//! DCQCN as its authors describe it (increase timer 55 µs, byte counter 10 MB, gain 1/256, a
//! CNP per 50 µs); the steps are 1/200 and 1/20 of the line's rate. Without loss, with PFC,
//! go-back-N is lossless RoCEv2.

#![forbid(unsafe_code)]

use super::fabric::{flow_hash, Ps, ETHERNET, NS};
use super::net::{Event, Net, Note};
use super::packet::{Kind, NONE};
use std::collections::{HashMap, VecDeque};

/// IPv4, UDP, BTH, RETH and ICRC.
const HEADERS: u32 = 20 + 8 + 12 + 16 + 4;
const ROCE_PORT: u16 = 4791;

/// Data packets per acknowledgement (go-back-N).
const ACK_EVERY: u64 = 4;
const CNP_EVERY: Ps = 50_000 * NS;
const RATE_TIMER: Ps = 55_000 * NS;
const RATE_BYTES: u64 = 10_000_000;
const FAST_STEPS: u32 = 5;
const GAIN: f64 = 1.0 / 256.0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Model {
    GoBackN,
    Selective,
    Ideal,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct ModelSetup {
    pub(crate) model: Model,
    /// Of a packet, IP header included.
    pub(crate) mtu: u32,
    pub(crate) rto: Ps,
    /// Round trip of a full packet on an empty network.
    pub(crate) rtt: Ps,
}

struct Message {
    first: u64,
    end: u64,
    bytes: u32,
    tag: u32,
    /// Ideal: packets that have not arrived.
    missing: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    acked: bool,
    lost: bool,
    order: u64,
}

struct Flow {
    src: u32,
    dst: u32,
    hash: u64,
    /// The host's list that it waits in, and whether it does.
    list: usize,
    listed: bool,
    messages: VecDeque<Message>,
    /// Of those, delivered.
    delivered: usize,
    una: u64,
    next: u64,
    end: u64,
    highest: u64,
    // The receiver's.
    expected: u64,
    nak_sent: bool,
    since_ack: u64,
    got: VecDeque<bool>,
    last_cnp: Ps,
    // Timer.
    rto_at: Ps,
    rto_armed: bool,
    // DCQCN.
    rate: f64,
    target: f64,
    alpha: f64,
    cnp_seen: bool,
    timer_steps: u32,
    byte_steps: u32,
    step_bytes: u64,
    next_time: Ps,
    rate_armed: bool,
    // Selective repeat.
    slots: VecDeque<Slot>,
    order: u64,
    inflight: u64,
    lost: u64,
    window: f64,
    marked: u64,
    acked: u64,
    round_end: u64,
}

pub(crate) struct Models {
    setup: ModelSetup,
    flows: Vec<Flow>,
    by_pair: HashMap<(u32, u32), u32>,
    /// Flows that have something to send, by host port (ideal: by host).
    lists: Vec<VecDeque<u32>>,
    nic_armed: Vec<bool>,
    line: f64,
}

impl Models {
    pub(crate) fn new(setup: ModelSetup, net: &Net) -> Self {
        let ports = net.fabric.layout.hosts * net.fabric.layout.planes;
        Self {
            setup,
            flows: Vec::new(),
            by_pair: HashMap::new(),
            lists: (0..ports).map(|_| VecDeque::new()).collect(),
            nic_armed: vec![false; ports],
            line: net.fabric.layout.rate,
        }
    }

    fn payload(&self) -> u32 {
        self.setup.mtu - HEADERS
    }

    fn ideal(&self) -> bool {
        self.setup.model == Model::Ideal
    }

    fn connect(&mut self, net: &mut Net, src: u32, dst: u32) -> u32 {
        let port = 0xc000 | (net.rng.next() & 0x3fff) as u16;
        let hash = flow_hash(src, dst, port, ROCE_PORT);
        let planes = net.fabric.layout.planes;
        let list = if self.ideal() {
            src as usize * planes
        } else {
            net.host_port(src as usize, hash)
        };
        let bdp = self.line / 8.0 * (self.setup.rtt as f64 / 1e12);
        let window = (bdp / f64::from(self.setup.mtu)).ceil() + 1.0;
        self.flows.push(Flow {
            src,
            dst,
            hash,
            list,
            listed: false,
            messages: VecDeque::new(),
            delivered: 0,
            una: 0,
            next: 0,
            end: 0,
            highest: 0,
            expected: 0,
            nak_sent: false,
            since_ack: 0,
            got: VecDeque::new(),
            last_cnp: 0,
            rto_at: Ps::MAX,
            rto_armed: false,
            rate: self.line,
            target: self.line,
            alpha: 1.0,
            cnp_seen: false,
            timer_steps: 0,
            byte_steps: 0,
            step_bytes: 0,
            next_time: 0,
            rate_armed: false,
            slots: VecDeque::new(),
            order: 0,
            inflight: 0,
            lost: 0,
            window,
            marked: 0,
            acked: 0,
            round_end: 0,
        });
        (self.flows.len() - 1) as u32
    }

    pub(crate) fn post(&mut self, net: &mut Net, src: u32, dst: u32, bytes: u32, tag: u32) {
        let f = match self.by_pair.get(&(src, dst)) {
            Some(f) => *f,
            None => {
                let f = self.connect(net, src, dst);
                self.by_pair.insert((src, dst), f);
                f
            }
        };
        let packets = u64::from(bytes.div_ceil(self.payload()).max(1));
        let flow = &mut self.flows[f as usize];
        flow.messages.push_back(Message {
            first: flow.end,
            end: flow.end + packets,
            bytes,
            tag,
            missing: packets,
        });
        flow.end += packets;
        self.enlist(net, f);
    }

    fn enlist(&mut self, net: &mut Net, f: u32) {
        let flow = &mut self.flows[f as usize];
        let list = flow.list;
        if !flow.listed {
            flow.listed = true;
            self.lists[list].push_back(f);
        }
        let planes = net.fabric.layout.planes;
        let n = if self.ideal() { planes } else { 1 };
        for port in list..list + n {
            self.nic(net, port, false);
        }
    }

    /// A host's port may send; `woken`: its own event says so.
    pub(crate) fn nic(&mut self, net: &mut Net, port: usize, woken: bool) {
        if woken {
            self.nic_armed[port] = false;
        }
        let planes = net.fabric.layout.planes;
        let list = if self.ideal() {
            port / planes * planes
        } else {
            port
        };
        while net.fabric.is_idle(net.now, port) && net.fabric.ports[port].alive {
            let mut soonest = Ps::MAX;
            let mut chosen = None;
            for _ in 0..self.lists[list].len() {
                let Some(f) = self.lists[list].pop_front() else {
                    break;
                };
                match self.ready(f, net.now) {
                    Some(at) if at <= net.now => {
                        chosen = Some(f);
                        break;
                    }
                    Some(at) => {
                        soonest = soonest.min(at);
                        self.lists[list].push_back(f);
                    }
                    None => self.flows[f as usize].listed = false,
                }
            }
            let Some(f) = chosen else {
                if soonest != Ps::MAX {
                    self.arm(net, port, soonest);
                }
                return;
            };
            self.lists[list].push_back(f);
            self.send_data(net, f, port);
        }
        let busy = net.fabric.ports[port].busy_until;
        if busy > net.now && !self.lists[list].is_empty() {
            self.arm(net, port, busy);
        }
    }

    fn arm(&mut self, net: &mut Net, port: usize, at: Ps) {
        if !self.nic_armed[port] {
            self.nic_armed[port] = true;
            net.at(at.max(net.now + 1), Event::Nic { port: port as u32 });
        }
    }

    /// When the flow may send; `None`: not before something happens.
    fn ready(&self, f: u32, _now: Ps) -> Option<Ps> {
        let flow = &self.flows[f as usize];
        match self.setup.model {
            Model::Ideal => (flow.next < flow.end).then_some(0),
            Model::GoBackN => (flow.next < flow.end).then_some(flow.next_time),
            Model::Selective => {
                let room = (flow.inflight as f64) < flow.window.max(1.0);
                (room && (flow.lost != 0 || flow.next < flow.end)).then_some(0)
            }
        }
    }

    fn bytes_of(&self, flow: &Flow, psn: u64) -> u32 {
        let full = self.payload();
        let m = flow
            .messages
            .iter()
            .rev()
            .find(|m| m.first <= psn && psn < m.end);
        let m = m.expect("a packet of a message");
        let before = (psn - m.first) as u32 * full;
        (m.bytes - before).min(full)
    }

    fn send_data(&mut self, net: &mut Net, f: u32, port: usize) {
        let i = f as usize;
        let model = self.setup.model;
        let flow = &mut self.flows[i];
        let mut psn = flow.next;
        if model == Model::Selective && flow.lost != 0 {
            let k = flow.slots.iter().position(|s| s.lost).expect("one is lost");
            psn = flow.una + k as u64;
            flow.lost -= 1;
        } else {
            flow.next += 1;
        }
        if psn < flow.highest {
            net.sums.resent += 1;
        }
        flow.highest = flow.highest.max(psn + 1);
        if model == Model::Selective {
            flow.order += 1;
            let k = (psn - flow.una) as usize;
            if flow.slots.len() <= k {
                flow.slots.resize(k + 1, Slot::default());
            }
            flow.slots[k] = Slot {
                acked: false,
                lost: false,
                order: flow.order,
            };
            flow.inflight += 1;
        }
        let order = flow.order;
        let bytes = self.bytes_of(&self.flows[i], psn);
        let size = bytes + HEADERS + ETHERNET;
        let flow = &mut self.flows[i];
        let id = net.packets.take();
        let p = net.packets.get_mut(id);
        (p.src, p.dst, p.hash) = (flow.src, flow.dst, flow.hash);
        (p.kind, p.flow, p.psn, p.other) = (Kind::Data, f, psn, order);
        (p.size, p.payload, p.ingress) = (size, bytes, NONE);
        if model == Model::GoBackN {
            let time = (f64::from(size) * 8e12 / flow.rate) as Ps;
            flow.next_time = flow.next_time.max(net.now) + time;
            flow.step_bytes += u64::from(size);
            if flow.step_bytes >= RATE_BYTES {
                flow.step_bytes = 0;
                flow.byte_steps += 1;
                self.increase(i);
            }
        }
        if model != Model::Ideal {
            self.arm_rto(net, f);
        }
        net.leave(port, id);
    }

    fn arm_rto(&mut self, net: &mut Net, f: u32) {
        let flow = &mut self.flows[f as usize];
        flow.rto_at = net.now + self.setup.rto;
        if !flow.rto_armed {
            flow.rto_armed = true;
            net.at(flow.rto_at, Event::Rto { flow: f });
        }
    }

    pub(crate) fn rto(&mut self, net: &mut Net, f: u32) {
        let flow = &mut self.flows[f as usize];
        flow.rto_armed = false;
        if flow.una == flow.highest {
            return;
        }
        if flow.rto_at > net.now {
            flow.rto_armed = true;
            net.at(flow.rto_at, Event::Rto { flow: f });
            return;
        }
        if self.setup.model == Model::Selective {
            for s in flow.slots.iter_mut().filter(|s| !s.acked && !s.lost) {
                s.lost = true;
                flow.lost += 1;
            }
            flow.inflight = 0;
        } else {
            flow.next = flow.una;
        }
        self.arm_rto(net, f);
        self.enlist(net, f);
    }

    // DCQCN.

    fn increase(&mut self, i: usize) {
        let line = self.line;
        let flow = &mut self.flows[i];
        let (most, least) = (
            flow.timer_steps.max(flow.byte_steps),
            flow.timer_steps.min(flow.byte_steps),
        );
        if least > FAST_STEPS {
            flow.target += line / 20.0;
        } else if most > FAST_STEPS {
            flow.target += line / 200.0;
        }
        flow.target = flow.target.min(line);
        flow.rate = (flow.rate + flow.target) / 2.0;
    }

    pub(crate) fn rate(&mut self, net: &mut Net, f: u32) {
        let i = f as usize;
        let flow = &mut self.flows[i];
        flow.rate_armed = false;
        if !flow.cnp_seen {
            flow.alpha *= 1.0 - GAIN;
        }
        flow.cnp_seen = false;
        flow.timer_steps += 1;
        self.increase(i);
        let flow = &mut self.flows[i];
        if flow.rate < self.line * 0.999 {
            flow.rate_armed = true;
            net.at(net.now + RATE_TIMER, Event::Rate { flow: f });
        }
    }

    fn cnp(&mut self, net: &mut Net, f: u32) {
        let flow = &mut self.flows[f as usize];
        flow.cnp_seen = true;
        flow.target = flow.rate;
        flow.rate = (flow.rate * (1.0 - flow.alpha / 2.0)).max(1e8);
        flow.alpha = (1.0 - GAIN) * flow.alpha + GAIN;
        flow.timer_steps = 0;
        flow.byte_steps = 0;
        flow.step_bytes = 0;
        if !flow.rate_armed {
            flow.rate_armed = true;
            net.at(net.now + RATE_TIMER, Event::Rate { flow: f });
        }
    }

    // Arrivals.

    fn answer(&mut self, net: &mut Net, f: u32, kind: Kind, psn: u64, other: u64) {
        let flow = &self.flows[f as usize];
        let id = net.packets.take();
        let p = net.packets.get_mut(id);
        (p.src, p.dst, p.hash) = (flow.dst, flow.src, flow.hash);
        (p.kind, p.flow, p.psn, p.other) = (kind, f, psn, other);
        p.size = 20 + 8 + 12 + 4 + 4 + ETHERNET;
        p.payload = 0;
        let (host, hash) = (flow.dst as usize, flow.hash);
        let port = net.host_port(host, hash);
        net.leave(port, id);
    }

    pub(crate) fn receive(&mut self, net: &mut Net, id: u32) {
        let p = net.packets.get(id);
        let (kind, f, psn, other, ce) = (p.kind, p.flow, p.psn, p.other, p.ce);
        let payload = p.payload;
        net.packets.free(id);
        match (kind, self.setup.model) {
            (Kind::Data, Model::Ideal) => {
                net.sums.delivered += u64::from(payload);
                self.ideal_data(net, f, psn);
            }
            (Kind::Data, Model::GoBackN) => self.gbn_data(net, f, psn, ce, payload),
            (Kind::Data, Model::Selective) => self.sr_data(net, f, psn, other, ce, payload),
            (Kind::Ack, Model::Selective) => self.sr_ack(net, f, psn, other),
            (Kind::Ack, _) => self.gbn_ack(net, f, psn),
            (Kind::Nak, _) => {
                self.gbn_ack(net, f, psn);
                let flow = &mut self.flows[f as usize];
                if psn >= flow.una {
                    flow.next = flow.una;
                }
                self.enlist(net, f);
            }
            (Kind::Cnp, _) => self.cnp(net, f),
            (Kind::Real, _) => {}
        }
    }

    fn deliver(&mut self, net: &mut Net, f: u32, upto: u64) {
        let flow = &mut self.flows[f as usize];
        while let Some(m) = flow.messages.get(flow.delivered) {
            if m.end > upto {
                break;
            }
            net.received(m.tag);
            flow.delivered += 1;
        }
    }

    fn forget(&mut self, net: &mut Net, f: u32) {
        let flow = &mut self.flows[f as usize];
        while flow.delivered > 0 {
            match flow.messages.front() {
                Some(m) if m.end <= flow.una => {
                    net.notes.push(Note::Sent);
                    flow.messages.pop_front();
                    flow.delivered -= 1;
                }
                _ => break,
            }
        }
    }

    fn ideal_data(&mut self, net: &mut Net, f: u32, psn: u64) {
        let flow = &mut self.flows[f as usize];
        let m = flow
            .messages
            .iter_mut()
            .find(|m| m.first <= psn && psn < m.end)
            .expect("a packet of a message");
        m.missing -= 1;
        while flow.messages.front().is_some_and(|m| m.missing == 0) {
            if let Some(m) = flow.messages.pop_front() {
                net.received(m.tag);
                net.notes.push(Note::Sent);
            }
        }
    }

    fn gbn_data(&mut self, net: &mut Net, f: u32, psn: u64, ce: bool, payload: u32) {
        let now = net.now;
        let flow = &mut self.flows[f as usize];
        if ce && (flow.last_cnp == 0 || now - flow.last_cnp >= CNP_EVERY) {
            flow.last_cnp = now;
            self.answer(net, f, Kind::Cnp, 0, 0);
        }
        let flow = &mut self.flows[f as usize];
        if psn > flow.expected {
            if !flow.nak_sent {
                flow.nak_sent = true;
                let n = flow.expected;
                self.answer(net, f, Kind::Nak, n, 0);
            }
            return;
        }
        if psn < flow.expected {
            let n = flow.expected;
            self.answer(net, f, Kind::Ack, n, 0);
            return;
        }
        net.sums.delivered += u64::from(payload);
        flow.expected += 1;
        flow.nak_sent = false;
        flow.since_ack += 1;
        let n = flow.expected;
        let last = flow
            .messages
            .get(flow.delivered)
            .is_some_and(|m| m.end == n);
        if last || flow.since_ack >= ACK_EVERY {
            flow.since_ack = 0;
            self.answer(net, f, Kind::Ack, n, 0);
        }
        self.deliver(net, f, n);
    }

    fn gbn_ack(&mut self, net: &mut Net, f: u32, psn: u64) {
        let flow = &mut self.flows[f as usize];
        if psn > flow.una {
            flow.una = psn;
            flow.next = flow.next.max(psn);
            flow.rto_at = net.now + self.setup.rto;
            self.forget(net, f);
        }
    }

    fn sr_data(&mut self, net: &mut Net, f: u32, psn: u64, order: u64, ce: bool, payload: u32) {
        let flow = &mut self.flows[f as usize];
        if psn >= flow.expected {
            let k = (psn - flow.expected) as usize;
            if flow.got.len() <= k {
                flow.got.resize(k + 1, false);
            }
            if !flow.got[k] {
                flow.got[k] = true;
                net.sums.delivered += u64::from(payload);
            }
            while flow.got.front() == Some(&true) {
                flow.got.pop_front();
                flow.expected += 1;
            }
        }
        let n = flow.expected;
        // Number and order of what arrived; the mark is the lowest bit.
        self.answer(net, f, Kind::Ack, n, order << 1 | u64::from(ce));
        self.deliver(net, f, n);
    }

    fn sr_ack(&mut self, net: &mut Net, f: u32, cumulative: u64, other: u64) {
        let (order, ce) = (other >> 1, other & 1 == 1);
        let most = {
            let bdp = self.line / 8.0 * (self.setup.rtt as f64 / 1e12);
            (bdp / f64::from(self.setup.mtu)).ceil() + 1.0
        };
        let flow = &mut self.flows[f as usize];
        let mut news = 0;
        while flow.una < cumulative {
            flow.una += 1;
            let Some(s) = flow.slots.pop_front() else {
                break;
            };
            if !s.acked {
                news += 1;
                if s.lost {
                    flow.lost -= 1;
                } else {
                    flow.inflight = flow.inflight.saturating_sub(1);
                }
            }
        }
        flow.next = flow.next.max(flow.una);
        let mut again = 0;
        for s in flow.slots.iter_mut() {
            if s.acked || s.lost {
                continue;
            }
            match s.order.cmp(&order) {
                std::cmp::Ordering::Equal => {
                    s.acked = true;
                    news += 1;
                    flow.inflight = flow.inflight.saturating_sub(1);
                }
                std::cmp::Ordering::Less => {
                    s.lost = true;
                    again += 1;
                    flow.inflight = flow.inflight.saturating_sub(1);
                }
                std::cmp::Ordering::Greater => {}
            }
        }
        flow.lost += again;
        flow.acked += 1;
        flow.marked += u64::from(ce);
        if news > 0 {
            flow.rto_at = net.now + self.setup.rto;
            flow.window = (flow.window + news as f64 / flow.window.max(1.0)).min(most);
        }
        if flow.una >= flow.round_end {
            let share = flow.marked as f64 / flow.acked.max(1) as f64;
            flow.alpha = flow.alpha * (15.0 / 16.0) + share / 16.0;
            if flow.marked != 0 {
                flow.window = (flow.window * (1.0 - flow.alpha / 2.0)).max(0.25);
            }
            flow.marked = 0;
            flow.acked = 0;
            flow.round_end = flow.next;
        }
        self.forget(net, f);
        self.enlist(net, f);
    }

    pub(crate) fn connect_all(&mut self, net: &mut Net, pairs: &[(u32, u32)]) {
        for &(a, b) in pairs {
            let f = self.connect(net, a, b);
            self.by_pair.insert((a, b), f);
        }
    }
}
