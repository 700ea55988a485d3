// SPDX-License-Identifier: GPL-2.0

//! Extensions: what a program may ask and set beside verbs (`METAROCE_OBJECT_QP` of
//! <rdma/metaroce-abi.h>), and what a connection remembers of its paths for it.
//!
//! A program names one of its QPs; the RDMA core has looked it up among those of the caller.
//! Answers are about the connection that the QP is in, which it may share with others.
//!
//! | refusal | errno |
//! | --- | --- |
//! | QP of somebody else, or none | ENOENT (from the RDMA core) |
//! | an attribute is missing or too short | EINVAL (from the RDMA core) |
//! | bytes behind what is known of a structure that are not 0 | EOPNOTSUPP (from the RDMA core) |
//! | QUERY: room for paths, but not how long one is | ENOENT |
//! | QUERY, TRANSITIONS: elements of 0 bytes or more than `METAROCE_MAX_STRIDE` | EINVAL |
//! | MODIFY: unknown bits in the mask, more than 64 paths, planes above 7, unknown ordering or controller, events above 1 | EINVAL |
//! | MODIFY: paths, planes, controller of a QP that has a connection (from RTR to RESET) | EISCONN |
//! | MODIFY: a controller that cuts no window, other than the device's, without CAP_NET_ADMIN | EPERM |
//! | MODIFY: events of a QP that has none | ENOTCONN |
//! | MODIFY: events, and `METAROCE_MAX_LISTENERS` of the connection listen | ENOSPC |
//!
//! A QP without a connection (RESET, INIT) is no error: its state is NONE, it has no paths and
//! no transitions.

#![forbid(unsafe_code)]

use super::qp::Qp;
use crate::{
    drive,
    kernel_ext::ib_dv::{Arguments, Method},
    os,
    proto::{
        api::{StreamId, Time},
        congestion::Controller,
        connection::{Connection, ConnectionState, Health, PathInfo, PATHS_MAX},
    },
    queue::dv::{
        self, modify, query, state, transitions, ConnectionInfo, Path, QpAttr, Transition,
        MAX_LISTENERS, MAX_TRANSITIONS,
    },
};
use ::kernel::prelude::*;

/// What a connection remembers of its paths. Nothing is allocated after it was made.
pub struct History {
    /// Number of the next transition.
    next: u64,
    /// The last ones, used round.
    ring: os::Vec<Transition>,
    /// State, port and plane of each path at its last transition. The plane is the
    /// connection's: another pair of planes that has the same one of the device is another one.
    last: os::Vec<(u32, u16, u8)>,
    /// Streams whose QPs listen.
    listeners: os::Vec<StreamId>,
}

fn health(health: Health) -> u32 {
    match health {
        Health::Good => state::PATH_GOOD,
        Health::Suspect => state::PATH_SUSPECT,
        Health::Failed => state::PATH_FAILED,
    }
}

impl History {
    /// Nothing has happened yet.
    pub fn new() -> Result<Self> {
        Ok(Self {
            next: 0,
            ring: os::Vec::with_capacity(MAX_TRANSITIONS)?,
            last: os::Vec::from_fn(PATHS_MAX, |_| (state::PATH_GOOD, 0, 0))?,
            listeners: os::Vec::with_capacity(MAX_LISTENERS)?,
        })
    }

    /// The connection has come up, with these paths.
    pub fn begin(&mut self, paths: impl Iterator<Item = PathInfo>) {
        for (last, path) in self.last.iter_mut().zip(paths) {
            *last = (health(path.health), path.port, path.plane);
        }
    }

    /// Remembers what has become of a path, which is on this plane of the device. False:
    /// nothing that shows.
    pub fn record(&mut self, now: Time, path: &PathInfo, plane: u8) -> bool {
        let Some(last) = self.last.get_mut(usize::from(path.path)) else {
            return false;
        };
        let to = (health(path.health), path.port, path.plane);
        let from = ::core::mem::replace(last, to);
        if from == to {
            return false;
        }
        let transition = Transition {
            number: self.next,
            time: now,
            path: u32::from(path.path),
            plane: u32::from(plane),
            from_state: from.0,
            to_state: to.0,
            from_port: u32::from(from.1),
            to_port: u32::from(to.1),
        };
        let at = (self.next % MAX_TRANSITIONS as u64) as usize;
        match self.ring.get_mut(at) {
            Some(slot) => *slot = transition,
            None => {
                // There is room: the ring is not full yet.
                let _ = self.ring.push(transition);
            }
        }
        self.next = self.next.wrapping_add(1);
        true
    }

    /// Number of the next transition.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Adds those from number `from` on that are remembered to `list`, within its capacity.
    pub fn read(&self, from: u64, list: &mut os::Vec<Transition>) {
        let oldest = self.next.saturating_sub(self.ring.len() as u64);
        for number in from.max(oldest)..self.next {
            let at = (number % MAX_TRANSITIONS as u64) as usize;
            let Some(t) = self.ring.get(at) else { return };
            if list.len() == list.capacity() || list.push(*t).is_err() {
                return;
            }
        }
    }

    /// Streams whose QPs listen.
    pub fn listeners(&self) -> &[StreamId] {
        &self.listeners
    }

    /// The QP of a stream listens. `ENOSPC`: too many do.
    pub fn listen(&mut self, stream: StreamId) -> Result {
        if self.listeners.contains(&stream) {
            return Ok(());
        }
        if self.listeners.len() == self.listeners.capacity() {
            return Err(ENOSPC);
        }
        self.listeners.push(stream).map_err(|_| ENOSPC)
    }

    /// It does no more.
    pub fn unlisten(&mut self, stream: StreamId) {
        if let Some(last) = self.listeners.pop() {
            if let Some(slot) = self.listeners.iter_mut().find(|s| **s == stream) {
                *slot = last;
            } else if last != stream {
                // Neither: there is room where it was.
                let _ = self.listeners.push(last);
            }
        }
    }
}

/// Does what a program asks of `qp`.
pub(super) fn call(qp: &Qp, method: Method, arguments: &Arguments<'_>) -> Result {
    match method {
        Method::Query => ask(qp, arguments),
        Method::Modify => change(qp, arguments),
        Method::Transitions => read(qp, arguments),
    }
}

fn ask(qp: &Qp, arguments: &Arguments<'_>) -> Result {
    let mut info = ConnectionInfo::default();
    // Room for all paths: they are copied under a lock.
    let mut paths = os::Vec::with_capacity(PATHS_MAX)?;
    qp.inspect(&mut info, &mut paths);
    arguments.output(query::CONNECTION, &info)?;
    if arguments.has(query::PATHS) {
        let size: u32 = arguments.input(query::PATH_SIZE)?;
        arguments.outputs(query::PATHS, size, &paths)?;
    }
    Ok(())
}

fn change(qp: &Qp, arguments: &Arguments<'_>) -> Result {
    let attr: QpAttr = arguments.input(modify::ATTR)?;
    const KNOWN: u32 = dv::mask::PATHS
        | dv::mask::ORDERING
        | dv::mask::EVENTS
        | dv::mask::PLANES
        | dv::mask::CONTROLLER;
    if attr.mask & !KNOWN != 0 {
        return Err(EINVAL);
    }
    qp.set_extension(&attr)
}

fn read(qp: &Qp, arguments: &Arguments<'_>) -> Result {
    let from: u64 = arguments.input(transitions::FROM)?;
    let size: u32 = arguments.input(transitions::SIZE)?;
    let mut list = os::Vec::with_capacity(MAX_TRANSITIONS)?;
    qp.transitions(from, &mut list);
    let copied = arguments.outputs(transitions::LIST, size, &list)?;
    arguments.output(transitions::COUNT, &copied)
}

/// As the interface says it.
pub fn connection_state(of: ConnectionState) -> u32 {
    match of {
        ConnectionState::Connecting => state::CONNECTING,
        // One that rests is up as far as programs are concerned.
        ConnectionState::Up | ConnectionState::Resting => state::UP,
        ConnectionState::Closing => state::CLOSING,
        ConnectionState::Closed => state::CLOSED,
        ConnectionState::Failed => state::FAILED,
    }
}

/// The controller that a program names; `None` is the device's. `EINVAL`: there is no such one.
pub(super) fn controller(named: u32) -> Result<Option<Controller>> {
    match named {
        dv::controller::DEFAULT => Ok(None),
        dv::controller::AIMD => Ok(Some(Controller::Aimd)),
        dv::controller::FIXED => Ok(Some(Controller::Fixed)),
        _ => Err(EINVAL),
    }
}

/// As the interface names it.
fn controller_name(of: Controller) -> u32 {
    match of {
        Controller::Aimd => dv::controller::AIMD,
        Controller::Fixed => dv::controller::FIXED,
    }
}

/// As the interface shows a path.
fn path(core: &Connection, p: &PathInfo) -> Path {
    let (plane, peer) = core.plane(p.plane).map_or((0, 0), |p| (p.local, p.remote));
    Path {
        path: u32::from(p.path),
        plane: u32::from(plane),
        state: health(p.health),
        port: u32::from(p.port),
        epoch: u32::from(p.epoch),
        failures: p.failures,
        window: p.window,
        inflight: p.inflight,
        // Without a measurement the core assumes one.
        srtt: if p.min_rtt == 0 { 0 } else { p.srtt },
        min_rtt: p.min_rtt,
        packets: p.packets,
        bytes: p.bytes,
        resent: p.resent,
        moved: p.moved,
        ce: p.ce,
        received: p.received,
        threshold: p.threshold,
        peer_plane: u32::from(peer),
    }
}

/// How the connection of an attachment, and its paths, are now. `paths` has room for all.
pub(super) fn inspect(
    attachment: &drive::Attachment,
    info: &mut ConnectionInfo,
    paths: &mut os::Vec<Path>,
) {
    attachment.inspect(&mut |conn, core, history| {
        let counters = core.counters();
        info.number = conn.number;
        info.next_transition = history.next();
        info.local_gid = conn.key.local;
        info.remote_gid = conn.key.remote;
        info.state = connection_state(core.state());
        info.dscp = u32::from(conn.key.dscp);
        info.planes = match core.planes_named() {
            u8::MAX => 0,
            named => u32::from(named),
        };
        info.controller = controller_name(core.controller());
        info.qps = u32::try_from(core.streams()).unwrap_or(u32::MAX);
        info.payload_mtu = core.payload_mtu();
        info.share = u64::from(core.share());
        info.sent_packets = counters.sent_packets;
        info.sent_bytes = counters.sent_bytes;
        info.rcvd_packets = counters.rcvd_packets;
        info.rcvd_bytes = counters.rcvd_bytes;
        info.resent_packets = counters.retransmits;
        info.spurious = counters.spurious;
        info.moved_packets = counters.moved;
        info.ce_rcvd = counters.ce_rcvd;
        info.ce_echoed = counters.ce_echoed;
        info.window_cuts = counters.window_cuts;
        for p in core.paths() {
            info.paths = info.paths.wrapping_add(1);
            if p.health == Health::Good {
                info.paths_good = info.paths_good.wrapping_add(1);
                info.window = info.window.wrapping_add(u64::from(p.window));
                info.inflight = info.inflight.wrapping_add(u64::from(p.inflight));
            }
            if paths.len() < paths.capacity() {
                let _ = paths.push(path(core, &p));
            }
        }
    });
}
