// SPDX-License-Identifier: GPL-2.0

#![forbid(unsafe_code)]

use crate::{crc32c, Datagram};
use metaroce::proto::api::{
    self, ConnectionError, Event, Fault, Opcode, Payload, Placed, Placement, RxInfo, SendWr,
    Status, StreamId, Target, Time, Token, Transmit, WrOp,
};
use metaroce::proto::congestion::Shares;
use metaroce::proto::connection::{stateless_reply, Config, Connection, Ids};
use metaroce::proto::stream::{PostError, State, Stream, StreamAttr};
use metaroce::proto::wire::{self, HandshakeKey, Packet, PlaneAddress, PLANES_MAX};
use std::collections::{HashMap, VecDeque};

/// What a test wants to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// A WR is done.
    Sent {
        /// QP index.
        qp: usize,
        /// WR number.
        wr: u32,
        /// Status.
        status: Status,
    },
    /// A receive is done.
    Received {
        /// QP index.
        qp: usize,
        /// Receive message number.
        rmsn: u32,
        /// The event.
        event: Event,
    },
    /// The stream failed.
    Error {
        /// QP index.
        qp: usize,
        /// Fault of the responder.
        fault: Option<Fault>,
    },
    /// Another event.
    Other(Event),
}

/// How a WR ended, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// WR number.
    pub wr: u32,
    /// Status.
    pub status: Status,
    /// When.
    pub at: Time,
}

/// A posted receive.
#[derive(Clone, Debug, Default)]
pub struct Receive {
    /// The buffer.
    pub data: Vec<u8>,
    /// Completed.
    pub done: bool,
}

/// A queue pair of a simulated host.
pub struct Qp {
    /// Its number.
    pub qpn: u32,
    /// Connection index and stream, when connected.
    pub place: Option<(usize, StreamId)>,
    /// Stream before it is attached.
    pub stream: Option<Box<Stream>>,
    /// Source or destination bytes of each WR, by number.
    pub sends: HashMap<u32, (SendWr, Vec<u8>)>,
    /// Receives by number; bound in order.
    pub receives: Vec<Receive>,
    /// Receives bound so far.
    pub bound: usize,
    /// WRs posted.
    pub posted: u64,
    /// Completions of WRs.
    pub completions: Vec<Completion>,
    /// Completions of receives.
    pub received: Vec<Event>,
    /// The stream's error, when it had one.
    pub error: Option<Option<Fault>>,
}

impl Qp {
    /// WRs that are not done.
    pub fn open(&self) -> usize {
        self.posted as usize - self.completions.len()
    }
}

/// What a QP is made with.
#[derive(Clone, Copy, Debug)]
pub struct QpSetup {
    /// Depth of the send queue.
    pub max_send_wr: u32,
    /// READs and atomics, both ways.
    pub rd_atomic: u32,
    /// Local ACK timeout, ns.
    pub timeout: Time,
    /// Retries.
    pub retry_cnt: u8,
    /// RNR retries.
    pub rnr_retry: u8,
    /// RNR timer, microseconds.
    pub min_rnr_timer_us: u32,
    /// Stream window in packets.
    pub window: u32,
    /// Connection parameters are kept by the host; this is the DSCP.
    pub dscp: u8,
}

impl Default for QpSetup {
    fn default() -> Self {
        Self {
            max_send_wr: 128,
            rd_atomic: 16,
            timeout: 500_000_000,
            retry_cnt: 7,
            rnr_retry: 7,
            min_rnr_timer_us: 100,
            window: 4096,
            dscp: 0,
        }
    }
}

/// A registered region.
#[derive(Clone, Debug)]
pub struct Region {
    /// First address.
    pub base: u64,
    /// Contents.
    pub data: Vec<u8>,
    /// Remote access allowed.
    pub remote: bool,
}

pub(crate) struct Conn {
    pub(crate) core: Connection,
    pub(crate) peer: usize,
    held: HashMap<TokenKey, (Placement, Vec<u8>)>,
    placing: HashMap<TokenKey, Placement>,
    armed: Time,
}

type TokenKey = (u32, u32, u8, u32);

fn token_key(t: &Token) -> TokenKey {
    (
        t.stream.0,
        t.generation,
        matches!(t.direction, api::Direction::Response) as u8,
        t.sseq,
    )
}

/// A simulated host.
pub struct Host {
    /// Index.
    pub index: usize,
    /// Parameters of its connections.
    pub config: Config,
    /// It is running.
    pub is_on: bool,
    /// The machine stands still until then: nothing is handled, timers are late.
    pub stalled_until: Time,
    /// Next time that it does so by itself.
    pub next_noise: Time,
    pub(crate) in_batch: bool,
    pub(crate) conns: Vec<Option<Conn>>,
    /// Queue pairs.
    pub qps: Vec<Qp>,
    /// Regions by key.
    pub memory: HashMap<u32, Region>,
    /// Planes of the device; none is the usual one.
    planes: Vec<PlaneAddress>,
    /// Packets to addresses that nobody has.
    pub strays: Vec<Datagram>,
    /// Shares of the inbound bandwidth, when the host gives any.
    pub shares: Option<Shares>,
    /// Packets that were dropped before they reached a connection.
    pub crc_errors: u64,
    /// Held packets at the most.
    pub hold_limit: usize,
    /// The local queue refuses every packet with this probability (millionths).
    pub refuse: u32,
    /// Packets that it refused.
    pub refused: u64,
    /// Pads all the checks that would slow a test: no CRC is computed or checked.
    pub skip_crc: bool,
    /// Times that a timer has gone off.
    pub timers: u64,
    secret: [u8; 16],
    next_qpn: u32,
    next_cid: u64,
    replies: VecDeque<(usize, Transmit)>,
    running_reads: HashMap<u32, HashMap<u32, (u64, u32)>>,
    rng: crate::Rng,
    /// Called once per atomic: (QP, value before).
    pub atomics: u64,
}

/// GID of host `i`.
pub fn gid(i: usize) -> [u8; 16] {
    gid_on(i, 0)
}

/// GID of host `i` on a plane.
pub fn gid_on(i: usize, plane: u8) -> [u8; 16] {
    let mut g = [0; 16];
    g[10] = 0xff;
    g[11] = 0xff;
    g[12] = 10;
    g[13] = plane;
    g[14] = (i >> 8) as u8;
    g[15] = i as u8 + 1;
    g
}

struct Answers<'a> {
    qps: &'a mut [Qp],
    conn: usize,
    held: usize,
    limit: usize,
}

impl Answers<'_> {
    fn qp(&mut self, stream: StreamId) -> Option<&mut Qp> {
        let conn = self.conn;
        self.qps
            .iter_mut()
            .find(|q| q.place == Some((conn, stream)))
    }
}

impl api::Host for Answers<'_> {
    fn bind_receive(&mut self, stream: StreamId, rmsn: u32) -> Option<u64> {
        let qp = self.qp(stream)?;
        assert_eq!(qp.bound, rmsn as usize, "receives are bound in order");
        let r = qp.receives.get(qp.bound)?;
        qp.bound += 1;
        Some(r.data.len() as u64)
    }

    fn receives_posted(&mut self, stream: StreamId) -> Option<u32> {
        let qp = self.qp(stream)?;
        Some((qp.receives.len() - qp.bound) as u32)
    }

    fn may_hold(&mut self, _bytes: u32) -> bool {
        self.held < self.limit
    }
}

impl Host {
    pub(crate) fn new(index: usize, seed: u64) -> Self {
        let mut rng = crate::Rng::new(seed);
        let mut config = Config::new(4200);
        config.instance = rng.next();
        config.seed = rng.next();
        config.margin = 200_000;
        let mut secret = [0; 16];
        for b in &mut secret {
            *b = rng.next() as u8;
        }
        config.secret = secret;
        Self {
            index,
            config,
            is_on: true,
            stalled_until: 0,
            next_noise: 0,
            in_batch: false,
            conns: Vec::new(),
            qps: Vec::new(),
            memory: HashMap::new(),
            timers: 0,
            planes: Vec::new(),
            strays: Vec::new(),
            shares: None,
            crc_errors: 0,
            hold_limit: 256,
            refuse: 0,
            refused: 0,
            skip_crc: false,
            secret,
            next_qpn: 0x11 + index as u32 * 0x1000,
            next_cid: rng.next() << 20,
            replies: VecDeque::new(),
            running_reads: HashMap::new(),
            rng,
            atomics: 0,
        }
    }

    /// The host loses everything and starts again as another instance.
    pub fn restart(&mut self) {
        self.conns.clear();
        self.qps.clear();
        self.memory.clear();
        self.config.instance = self.rng.next();
    }

    /// Registers memory.
    pub fn register(&mut self, rkey: u32, base: u64, len: usize) {
        self.memory.insert(
            rkey,
            Region {
                base,
                data: vec![0; len],
                remote: true,
            },
        );
    }

    /// Names the planes of the device, by their ids: those that are there, and those of them
    /// that drain.
    pub fn set_planes(&mut self, now: Time, ids: &[u8], draining: &[u8]) {
        let index = self.index;
        let plane = |id: &u8| PlaneAddress {
            id: *id,
            draining: draining.contains(id),
            gid: gid_on(index, *id),
        };
        self.announce(now, ids.iter().map(plane).collect());
    }

    /// Says that these are the planes of the device, whether it is true or not.
    pub fn announce(&mut self, now: Time, planes: Vec<PlaneAddress>) {
        self.planes = planes;
        for c in self.conns.iter_mut().flatten() {
            drop(
                c.core
                    .allow_planes(Connection::plane_memory().expect("memory")),
            );
            c.core.set_planes(now, &self.planes);
        }
    }

    /// Whether the device has this plane.
    fn owns(&self, plane: u8) -> bool {
        if self.planes.is_empty() {
            return plane == 0;
        }
        let gid = gid_on(self.index, plane);
        self.planes.iter().any(|p| p.gid == gid)
    }

    /// Makes a QP without connection.
    pub fn make_qp(&mut self, setup: &QpSetup) -> usize {
        let stream = Stream::new(setup.max_send_wr, setup.rd_atomic).expect("memory");
        self.next_qpn += 1;
        self.qps.push(Qp {
            qpn: self.next_qpn,
            place: None,
            stream: Some(stream),
            sends: HashMap::new(),
            receives: Vec::new(),
            bound: 0,
            posted: 0,
            completions: Vec::new(),
            received: Vec::new(),
            error: None,
        });
        self.qps.len() - 1
    }

    fn connection_to(&mut self, now: Time, peer: usize, dscp: u8) -> usize {
        let found = self.conns.iter().position(|c| {
            c.as_ref()
                .is_some_and(|c| c.peer == peer && c.core.ids().dscp == dscp)
        });
        if let Some(i) = found {
            return i;
        }
        let i = self.conns.len();
        self.next_cid += 1 << 20;
        let ids = Ids {
            local_cid: self.next_cid | i as u64,
            local_gid: gid(self.index),
            remote_gid: gid(peer),
            dscp,
        };
        let mut core = Connection::new(&self.config, ids, now).expect("memory");
        if !self.planes.is_empty() {
            drop(core.allow_planes(Connection::plane_memory().expect("memory")));
            core.set_planes(now, &self.planes);
        }
        self.conns.push(Some(Conn {
            core,
            peer,
            held: HashMap::new(),
            placing: HashMap::new(),
            armed: Time::MAX,
        }));
        i
    }

    /// Moves a QP to RTR and RTS.
    #[allow(clippy::too_many_arguments)] // what modify_qp takes
    pub fn ready(
        &mut self,
        now: Time,
        qp: usize,
        peer: usize,
        remote_qpn: u32,
        sq_psn: u32,
        rq_psn: u32,
        setup: &QpSetup,
    ) {
        let conn = self.connection_to(now, peer, setup.dscp);
        let mut stream = self.qps[qp].stream.take().expect("not connected yet");
        stream.set_attr(&StreamAttr {
            local_qpn: self.qps[qp].qpn,
            remote_qpn,
            sq_psn,
            rq_psn,
            max_rd_atomic: setup.rd_atomic,
            max_dest_rd_atomic: setup.rd_atomic,
            timeout: setup.timeout,
            retry_cnt: setup.retry_cnt,
            rnr_retry: setup.rnr_retry,
            min_rnr_timer_us: setup.min_rnr_timer_us,
            payload_mtu: 1024,
            window: setup.window,
        });
        let core = &mut self.conns[conn].as_mut().expect("there").core;
        let spare = Connection::spare(core.wanted_slots()).expect("memory");
        let Ok((id, _)) = core.attach(now, stream, spare) else {
            panic!("attach refused");
        };
        self.qps[qp].place = Some((conn, id));
        core.set_state(now, id, State::Rtr);
        core.set_state(now, id, State::Rts);
    }

    /// Takes a QP out.
    pub fn destroy(&mut self, now: Time, qp: usize) {
        if let Some((conn, id)) = self.qps[qp].place.take() {
            if let Some(c) = self.conns[conn].as_mut() {
                c.core.detach(now, id);
                c.held.retain(|k, _| k.0 != id.0);
            }
        }
    }

    /// Posts a WR with its bytes (source, or room for the result).
    pub fn post(
        &mut self,
        now: Time,
        qp: usize,
        wr: SendWr,
        data: Vec<u8>,
    ) -> Result<u32, PostError> {
        let (conn, id) = self.qps[qp].place.expect("connected");
        let core = &mut self.conns[conn].as_mut().expect("there").core;
        let n = core.post_send(now, id, wr)?;
        self.qps[qp].sends.insert(n, (wr, data));
        self.qps[qp].posted += 1;
        Ok(n)
    }

    /// Posts a receive of `len` bytes.
    pub fn post_receive(&mut self, now: Time, qp: usize, len: usize) {
        self.qps[qp].receives.push(Receive {
            data: vec![0; len],
            done: false,
        });
        let posted = (self.qps[qp].receives.len() - self.qps[qp].bound) as u32;
        if let Some((conn, id)) = self.qps[qp].place {
            if let Some(c) = self.conns[conn].as_mut() {
                c.core.receives_changed(now, id, Some(posted));
            }
        }
    }

    /// The connection of a QP.
    pub fn connection(&mut self, qp: usize) -> &mut Connection {
        let (conn, _) = self.qps[qp].place.expect("connected");
        &mut self.conns[conn].as_mut().expect("there").core
    }

    /// Connection `i`, if it lives.
    pub fn connection_at(&mut self, i: usize) -> Option<&mut Connection> {
        self.conns.get_mut(i)?.as_mut().map(|c| &mut c.core)
    }

    fn answers(qps: &mut [Qp], conn: usize, held: usize, limit: usize) -> Answers<'_> {
        Answers {
            qps,
            conn,
            held,
            limit,
        }
    }

    pub(crate) fn deliver(&mut self, now: Time, d: Datagram) -> Option<(usize, Token, Vec<u8>)> {
        let packet = match Packet::parse(&d.bytes) {
            Ok(p) => p,
            Err(_) => return None,
        };
        let crc_is_due = !self.skip_crc;
        if crc_is_due {
            let mut copy = d.bytes.clone();
            copy[wire::CRC_OFFSET..wire::CRC_OFFSET + 4].fill(0);
            if crc32c(&copy) != packet.crc() {
                self.crc_errors += 1;
                return None;
            }
        }
        if !self.owns(d.planes.1) {
            return None;
        }
        let seen = HandshakeKey {
            source: gid_on(d.from, d.planes.0),
            destination: gid_on(self.index, d.planes.1),
            dscp: packet.handshake_key().map_or(0, |k| k.dscp),
        };
        let conn = self.conns.iter().position(|c| {
            c.as_ref().is_some_and(|c| match packet.connection_id() {
                Some(id) => c.core.ids().local_cid == id,
                None => packet
                    .handshake_key()
                    .is_some_and(|k| k == seen && c.peer == d.from && k.dscp == c.core.ids().dscp),
            })
        });
        let Some(conn) = conn else {
            let mut tx = Transmit::new();
            if stateless_reply(&packet, &seen, &self.secret, now, &mut tx) {
                self.replies.push_back((d.from, tx));
            }
            return None;
        };
        let header = packet.header_len();
        let info = RxInfo {
            ce: d.ce,
            plane: d.planes.1,
            payload_len: (d.bytes.len() - header) as u32,
        };
        let c = self.conns[conn].as_mut()?;
        let held = c.held.len();
        let mut host = Self::answers(&mut self.qps, conn, held, self.hold_limit);
        match c.core.receive(now, &packet, &info, &mut host) {
            Ok(api::Receive::Place(p)) => {
                c.placing.insert(token_key(&p.token), p);
                Some((conn, p.token, d.bytes[header..].to_vec()))
            }
            Ok(api::Receive::Hold(p)) => {
                c.held
                    .insert(token_key(&p.token), (p, d.bytes[header..].to_vec()));
                None
            }
            _ => None,
        }
    }

    /// Does the copy that `token` names and reports it.
    pub(crate) fn copy(&mut self, now: Time, conn: usize, token: Token, payload: &[u8]) {
        let Some(c) = self.conns.get_mut(conn).and_then(Option::as_mut) else {
            return;
        };
        let Some(p) = c.placing.remove(&token_key(&token)) else {
            return;
        };
        let result = place(&mut self.qps, &mut self.memory, conn, &p, payload);
        let held = c.held.len();
        let mut host = Self::answers(&mut self.qps, conn, held, self.hold_limit);
        c.core.placed(now, token, result, &mut host);
    }

    /// Handles one event. `Some(Some(..))` is a copy to be scheduled.
    #[allow(clippy::type_complexity)] // nothing, or something without or with a copy
    pub(crate) fn poll_event(
        &mut self,
        now: Time,
        conn: usize,
        notes: &mut VecDeque<(usize, Note)>,
    ) -> Option<Option<(Token, Vec<u8>)>> {
        let c = self.conns.get_mut(conn)?.as_mut()?;
        let e = c.core.poll_event(now)?;
        let at = |qps: &[Qp], s: StreamId| qps.iter().position(|q| q.place == Some((conn, s)));
        match e {
            Event::SendDone { stream, wr, status } => {
                if let Some(qp) = at(&self.qps, stream) {
                    self.qps[qp].completions.push(Completion {
                        wr,
                        status,
                        at: now,
                    });
                    notes.push_back((self.index, Note::Sent { qp, wr, status }));
                }
            }
            Event::RecvDone { stream, rmsn, .. } => {
                if let Some(qp) = at(&self.qps, stream) {
                    let r = &mut self.qps[qp].receives[rmsn as usize];
                    assert!(!r.done, "a receive completes once");
                    r.done = true;
                    self.qps[qp].received.push(e);
                    notes.push_back((self.index, Note::Received { qp, rmsn, event: e }));
                }
            }
            Event::Invalidate { stream, rkey } => {
                let r = match self.memory.get_mut(&rkey) {
                    Some(m) if m.remote => {
                        m.remote = false;
                        Ok(())
                    }
                    _ => Err(Fault::Access),
                };
                c.core.invalidated(now, stream, r);
            }
            Event::Read {
                stream,
                request,
                va,
                rkey,
                length,
            } => {
                let ok = length == 0 || slice(&mut self.memory, rkey, va, length).is_some();
                let r = if ok { Ok(()) } else { Err(Fault::Access) };
                c.core.read_ready(now, stream, request, r);
                if let Some(r) = self.reads(conn, stream) {
                    r.insert(request, (va, rkey));
                }
            }
            Event::Atomic {
                stream,
                request,
                opcode,
                va,
                rkey,
                compare_add,
                swap,
            } => {
                let r = if va % 8 != 0 {
                    Err(Fault::InvalidRequest)
                } else {
                    match slice(&mut self.memory, rkey, va, 8) {
                        None => Err(Fault::Access),
                        Some(s) => {
                            let old = u64::from_le_bytes(s[..8].try_into().expect("8 bytes"));
                            let new = match opcode {
                                Opcode::FetchAdd => old.wrapping_add(compare_add),
                                _ if old == compare_add => swap,
                                _ => old,
                            };
                            s[..8].copy_from_slice(&new.to_le_bytes());
                            self.atomics += 1;
                            Ok(old)
                        }
                    }
                };
                c.core.atomic_done(now, stream, request, r);
            }
            Event::Local { stream, wr } => c.core.local_done(now, stream, wr, Status::Success),
            Event::Release(p) => {
                if let Some((_, bytes)) = c.held.remove(&token_key(&p.token)) {
                    c.placing.insert(token_key(&p.token), p);
                    return Some(Some((p.token, bytes)));
                }
            }
            Event::Discard(token) => {
                c.held.remove(&token_key(&token));
            }
            Event::StreamError { stream, fault } => {
                c.core.set_state(now, stream, State::Err);
                if let Some(qp) = at(&self.qps, stream) {
                    assert!(self.qps[qp].error.is_none(), "one error per QP");
                    self.qps[qp].error = Some(fault);
                    notes.push_back((self.index, Note::Error { qp, fault }));
                }
            }
            Event::ConnectionClosed => {
                // Its last words.
                let mut tx = Transmit::new();
                while c.core.poll_transmit(now, &mut tx) {
                    self.replies.push_back((c.peer, tx));
                    tx = Transmit::new();
                }
                self.conns[conn] = None;
                notes.push_back((self.index, Note::Other(e)));
            }
            e => notes.push_back((self.index, Note::Other(e))),
        }
        Some(None)
    }

    /// Addresses of running READs, as responder.
    fn reads(&mut self, conn: usize, stream: StreamId) -> Option<&mut HashMap<u32, (u64, u32)>> {
        let qpn = self
            .qps
            .iter()
            .find(|q| q.place == Some((conn, stream)))?
            .qpn;
        Some(self.reads_of(qpn))
    }

    fn reads_of(&mut self, qpn: u32) -> &mut HashMap<u32, (u64, u32)> {
        self.running_reads.entry(qpn).or_default()
    }

    pub(crate) fn poll_transmit(&mut self, now: Time, conn: usize) -> Option<Datagram> {
        if let Some((to, tx)) = self.replies.pop_front() {
            return Some(self.datagram(to, (0, 0), &tx, &[]));
        }
        let mut tx = Transmit::new();
        loop {
            let c = self.conns.get_mut(conn)?.as_mut()?;
            if !c.core.poll_transmit(now, &mut tx) {
                return None;
            }
            let peer = c.peer;
            if self.refuse != 0 && self.rng.chance(self.refuse) {
                self.refused += 1;
                c.core.transmit_failed(now, &tx);
                continue;
            }
            let plane = c.core.plane(tx.plane).expect("a plane that is there");
            let payload = self.payload(conn, &tx.payload);
            let known = (0..PLANES_MAX as u8).find(|p| gid_on(peer, *p) == plane.remote_gid);
            let planes = (plane.local, known.unwrap_or(0));
            let d = self.datagram(peer, planes, &tx, &payload);
            if known.is_none() {
                self.strays.push(d);
                continue;
            }
            return Some(d);
        }
    }

    fn payload(&mut self, conn: usize, p: &Payload) -> Vec<u8> {
        match *p {
            Payload::None => Vec::new(),
            Payload::Pad { len } => vec![0; len as usize],
            Payload::Send {
                stream,
                wr,
                offset,
                len,
            } => {
                let qp = self
                    .qps
                    .iter()
                    .find(|q| q.place == Some((conn, stream)))
                    .expect("stream");
                let (_, data) = &qp.sends[&wr];
                data[offset as usize..(offset + len) as usize].to_vec()
            }
            Payload::Read {
                stream,
                request,
                offset,
                len,
            } => {
                let (va, rkey) = *self
                    .reads(conn, stream)
                    .and_then(|r| r.get(&request))
                    .expect("READ was announced");
                match slice(&mut self.memory, rkey, va + u64::from(offset), len) {
                    Some(s) => s.to_vec(),
                    None => vec![0; len as usize],
                }
            }
        }
    }

    fn datagram(&self, to: usize, planes: (u8, u8), tx: &Transmit, payload: &[u8]) -> Datagram {
        let mut bytes = tx.header[..usize::from(tx.header_len)].to_vec();
        bytes.extend_from_slice(payload);
        if !self.skip_crc {
            let crc = crc32c(&bytes);
            bytes[wire::CRC_OFFSET..wire::CRC_OFFSET + 4].copy_from_slice(&crc.to_be_bytes());
        }
        Datagram {
            from: self.index,
            to,
            planes,
            source_port: tx.source_port,
            bytes,
            ce: false,
            may_fragment: tx.may_fragment,
        }
    }

    pub(crate) fn timer_to_arm(&mut self, now: Time, conn: usize) -> Option<Time> {
        let c = self.conns.get_mut(conn)?.as_mut()?;
        let at = c.core.wake_at(now)?;
        if at < c.armed {
            c.armed = at;
            return Some(at);
        }
        None
    }

    pub(crate) fn timer(&mut self, now: Time, conn: usize) {
        if let Some(c) = self.conns.get_mut(conn).and_then(|c| c.as_mut()) {
            if c.armed > now {
                // It was set to another time.
                return;
            }
            c.armed = Time::MAX;
            self.timers += 1;
            c.core.handle_timeout(now);
        }
    }

    pub(crate) fn end_of_batch(&mut self, now: Time) {
        for c in self.conns.iter_mut().flatten() {
            c.core.end_of_batch(now);
            if let Some(n) = c.core.wants_records() {
                let more = Connection::record_memory(c.core.path_count(), n).expect("memory");
                drop(c.core.use_records(more));
            }
            if let Some(shares) = self.shares.as_mut() {
                if c.core.report_is_due(now) {
                    c.core.report(now, shares);
                }
            }
        }
    }

    /// Ends all connections at once.
    pub fn close_all(&mut self, now: Time) {
        for c in self.conns.iter_mut().flatten() {
            c.core.close(now);
        }
    }

    /// Whether a connection failed for this reason, and so on: see the notes.
    pub fn failed(notes: &VecDeque<(usize, Note)>) -> Option<ConnectionError> {
        notes.iter().find_map(|(_, n)| match n {
            Note::Other(Event::ConnectionFailed(e)) => Some(*e),
            _ => None,
        })
    }
}

/// `len` bytes of registered memory.
fn slice(memory: &mut HashMap<u32, Region>, rkey: u32, va: u64, len: u32) -> Option<&mut [u8]> {
    let m = memory.get_mut(&rkey)?;
    if !m.remote {
        return None;
    }
    let start = va.checked_sub(m.base)? as usize;
    m.data.get_mut(start..start.checked_add(len as usize)?)
}

fn place(
    qps: &mut [Qp],
    memory: &mut HashMap<u32, Region>,
    conn: usize,
    p: &Placement,
    payload: &[u8],
) -> Placed {
    let (at, len) = (p.offset as usize, p.len as usize);
    match p.target {
        Target::Remote { va, rkey } => {
            if p.total == 0 {
                return Placed::Ok;
            }
            let Some(s) = slice(memory, rkey, va, p.total) else {
                return Placed::Fault(Fault::Access);
            };
            s[at..at + len].copy_from_slice(payload);
        }
        Target::Receive { rmsn } => {
            let Some(qp) = qps
                .iter_mut()
                .find(|q| q.place == Some((conn, p.token.stream)))
            else {
                return Placed::Ok;
            };
            let r = &mut qp.receives[rmsn as usize];
            assert!(!r.done, "nothing is written to a receive that is done");
            r.data[at..at + len].copy_from_slice(payload);
        }
        Target::Request { wr } => {
            let Some(qp) = qps
                .iter_mut()
                .find(|q| q.place == Some((conn, p.token.stream)))
            else {
                return Placed::Ok;
            };
            assert!(
                !qp.completions.iter().rev().take(256).any(|c| c.wr == wr),
                "nothing is written to a WR that is done"
            );
            let (_, data) = qp.sends.get_mut(&wr).expect("posted");
            match p.value {
                Some(v) => data[..8].copy_from_slice(&v.to_le_bytes()),
                None => data[at..at + len].copy_from_slice(payload),
            }
        }
    }
    Placed::Ok
}

/// A Write of `len` bytes.
pub fn write(va: u64, rkey: u32, len: usize) -> SendWr {
    wr(WrOp::Write { va, rkey }, len)
}

/// Any WR, signaled.
pub fn wr(op: WrOp, len: usize) -> SendWr {
    SendWr {
        op,
        fence: false,
        solicited: false,
        signaled: true,
        length: len as u32,
        error: None,
    }
}
