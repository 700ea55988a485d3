// SPDX-License-Identifier: GPL-2.0

//! The device: what all its objects share, and the table of verbs.
//!
//! It refuses nothing itself but PDs with driver data (EOPNOTSUPP); [`super`] and the objects'
//! files say the rest. What keeps a device from being made is in [`super::link`].

#![forbid(unsafe_code)]

use super::{
    counters::Counters, cq::Cq, extension, link::Params, mr::Mr, pd::Pd, planes, port, qp::Qp,
    srq::Srq, ucontext::Context, MAX_CQE, MAX_RD_ATOMIC, MAX_SGE, MAX_WR,
};
use crate::{
    bindings, drive,
    kernel_ext::{
        bh,
        ib::{Back, Operations, QpInit, RawDevice, StatDesc, Udata},
        ib_attr::{DeviceAttr, MrAttr, MrRereg, PortAttr, QpAttr, QpCap, SrqAttr},
        ib_dv::{Arguments, Method},
        ib_planes::Change,
        ids::Ids,
        net::{NetDev, NetId, NetdevEvent},
        restrack::Details,
    },
    mem,
    net::{new_instance, random_u64, Client, Flow, Port, Skb},
    os,
    proto::{
        api::{ConnectionError, Time},
        congestion::{Controller, Shares},
        connection::{self, Connection},
        wire::{self, PLANES_MAX},
    },
    queue::{ABI_VERSION, DRIVER_ID},
};
use ::core::{
    fmt::{self, Write},
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};
use ::kernel::{
    new_spinlock,
    prelude::*,
    sync::{Arc, SpinLock},
};

/// QPs of a device at the most.
const MAX_QP: u32 = 1 << 20;
/// CQs, SRQs and PDs of a device at the most (what is reported; memory is the limit).
const MAX_OBJECTS: u32 = 1 << 20;

/// QP numbers 0 and 1 mean something else.
const FIRST_QPN: u32 = 2;
/// QP numbers have 24 bits; the last one is for multicast.
const LAST_QPN: u32 = 0xff_fffe;

/// Lowest source port of paths (the dynamic range of RFC 6335).
const PORT_BASE: u16 = 49152;
/// Idle connections are closed after this time, ns.
const IDLE: Time = 30_000_000_000;
/// Peers among which the inbound bandwidth is divided; further ones are not told a share.
const SENDERS: usize = 4096;
/// Least time before silence means anything, ns.
const MARGIN: u64 = 1_000_000;
/// What a host may take to gather acknowledgements, ns.
const BATCHING: u64 = 100_000;

/// A device, as softirq and objects hold it.
#[pin_data]
pub struct DeviceInner {
    back: Arc<Back<bindings::ib_device>>,
    /// Node GUID.
    guid: u64,
    params: Params,
    /// Its place in the network.
    pub port: Arc<Port>,
    /// Its connections.
    #[pin]
    pub table: drive::Table,
    /// Its memory regions.
    pub regions: Arc<mem::Table>,
    /// Numbers of QPs. 16 million are handed out before one is used again: at a million a
    /// minute, far more than can be made, none comes back within 60 s.
    #[pin]
    pub qpns: Ids,
    /// Numbers of PDs.
    domains: AtomicU64,
    /// Numbers of CQs and SRQs.
    queues: AtomicU32,
    /// How the inbound bandwidth of each plane's line is divided among the peers that send, by
    /// the planes' ids.
    #[pin]
    shares: SpinLock<os::Vec<Shares>>,
    /// What it counts.
    pub counters: Counters,
    /// Key of cookies and challenges.
    pub secret: [u8; 16],
    /// Names this life of the device.
    instance: u64,
    /// What the windows of new connections do: a place in [`Controller::ALL`].
    controller: AtomicU32,
}

/// What is chosen for a connection by the QP that makes it.
#[derive(Clone, Copy)]
pub struct Choice {
    /// Paths, 1 to 64.
    pub paths: u8,
    /// Planes over which it sends, a bit each.
    pub planes: u8,
    /// What the windows of its paths do.
    pub controller: Controller,
}

/// The device as the RDMA core has it.
pub struct Driver(Arc<DeviceInner>);

/// The device as the network has it.
struct NetClient(Arc<DeviceInner>);

impl DeviceInner {
    /// Makes a device over `netdev`, which is in the namespace `net`, and opens its port: packets
    /// may come at once.
    pub(super) fn open(
        back: Arc<Back<bindings::ib_device>>,
        netdev: &NetDev,
        net: NetId,
        guid: u64,
        params: Params,
    ) -> Result<Driver> {
        let regions = mem::Table::new()?;
        let port = Port::new()?;
        let (tools, keeper) = (drive::Tools::new()?, drive::Keeper::new()?);
        // The line's rate is looked up for each QP that connects.
        let shares = Self::shares_of(1)?;
        let mut secret = [0u8; 16];
        for chunk in secret.chunks_exact_mut(8) {
            chunk.copy_from_slice(&random_u64().to_ne_bytes());
        }
        let first = FIRST_QPN + (random_u64() as u32) % (LAST_QPN - FIRST_QPN);
        let inner = Arc::pin_init(
            pin_init!(Self {
                back,
                guid,
                params,
                port,
                table <- drive::Table::new(tools, keeper),
                regions,
                qpns <- Ids::new(FIRST_QPN, LAST_QPN, first),
                domains: AtomicU64::new(1),
                queues: AtomicU32::new(1),
                shares <- new_spinlock!(shares, "metaroce_shares"),
                counters: Counters::new(),
                secret,
                instance: new_instance(),
                controller: AtomicU32::new(0),
            }),
            GFP_KERNEL,
        )?;
        // From here on dropping the driver closes what is open.
        let driver = Driver(inner.clone());
        let client = Arc::new(NetClient(inner.clone()), GFP_KERNEL)?;
        inner.port.open(netdev.clone(), net, client)?;
        Ok(driver)
    }

    fn shares_of(planes: usize) -> Result<os::Vec<Shares>> {
        let mut shares = os::Vec::with_capacity(planes)?;
        for _ in 0..planes {
            shares.push(Shares::new(0, SENDERS)?).map_err(|_| ENOMEM)?;
        }
        Ok(shares)
    }

    /// Learns the rates of the planes' lines, by which they are divided. Process context
    /// without RTNL. Out of line: the caller goes on deep into the network stack.
    #[inline(never)]
    pub fn learn_rates(&self) {
        let mut rates = [0u32; PLANES_MAX];
        for (id, plane) in self.port.planes().iter().flat_map(|p| p.iter()) {
            if let Some(rate) = rates.get_mut(usize::from(id)) {
                *rate = plane.speed();
            }
        }
        let _bh = bh::disable();
        for (shares, rate) in self.shares.lock().iter_mut().zip(rates) {
            shares.set_kbit(rate.saturating_mul(1000));
        }
    }

    /// Makes room for the shares of planes up to `id`. Process context.
    fn make_shares(&self, id: u8) -> Result {
        let mut more = Self::shares_of(usize::from(id) + 1)?;
        let _bh = bh::disable();
        let mut shares = self.shares.lock();
        if shares.len() < more.len() {
            for (new, old) in more.iter_mut().zip(shares.iter_mut()) {
                ::core::mem::swap(new, old);
            }
            ::core::mem::swap(&mut more, &mut *shares);
        }
        drop(shares);
        Ok(())
    }

    /// Reports to the shares of all planes what a connection has received.
    pub fn report(&self, now: Time, core: &mut Connection) {
        let mut shares = self.shares.lock();
        for (id, shares) in (0..).zip(shares.iter_mut()) {
            core.report_on(now, id, shares);
        }
    }

    /// Changes the planes as the administrator says. Process context, no lock held.
    pub(super) fn change_planes(&self, change: planes::Order<'_>) -> Result {
        match change {
            planes::Order::Add(name, id) => {
                let id = self.port.add_plane(name, id)?;
                if let Err(e) = self.make_shares(id) {
                    self.port.remove_plane(name)?;
                    return Err(e);
                }
                self.learn_rates();
            }
            planes::Order::Remove(name) => self.port.remove_plane(name)?,
            planes::Order::Drain(name, draining) => self.port.drain_plane(name, draining)?,
        }
        self.table.planes_changed();
        Ok(())
    }

    /// Paths of a connection.
    pub fn paths(&self) -> usize {
        usize::from(self.params.paths)
    }

    /// `enum ib_mtu` of the port now.
    pub(super) fn active_mtu(&self) -> u32 {
        port::active_mtu(self.port.mtu())
    }

    /// What the windows of new connections do.
    pub fn controller(&self) -> Controller {
        let at = self.controller.load(Ordering::Relaxed) as usize;
        Controller::ALL.get(at).copied().unwrap_or_default()
    }

    /// Lets the windows of new connections do this.
    pub(super) fn set_controller(&self, controller: Controller) {
        let at = Controller::ALL.iter().position(|c| *c == controller);
        self.controller
            .store(at.unwrap_or(0) as u32, Ordering::Relaxed);
    }

    /// What a new connection over `flow`, with this choice, is like.
    pub fn connection_config(&self, flow: &Flow, choice: Choice) -> connection::Config {
        connection::Config {
            netdev_mtu: flow.mtu(),
            ipv6: flow.is_ipv6(),
            paths: choice.paths,
            crc: self.params.crc,
            zero_checksum6: false,
            path_records: connection::RECORDS_MIN as u16,
            margin: MARGIN,
            batching: BATCHING,
            idle: IDLE,
            instance: self.instance,
            secret: self.secret,
            seed: match self.params.seed {
                0 => random_u64(),
                fixed => fixed,
            },
            repeat: self.params.seed != 0,
            port_base: PORT_BASE,
            controller: choice.controller,
            planes: choice.planes,
        }
    }

    /// Counts a received packet that was dropped.
    pub fn count_drop(&self, why: wire::Drop) {
        self.counters.drop(why);
    }

    /// A connection could not be made, or is lost.
    pub fn connection_failed(&self, key: &drive::Key, why: ConnectionError) {
        self.counters.connection_error();
        if let ConnectionError::Version { lowest, highest } = why {
            pr_warn!(
                "{:x?} speaks wire versions {} to {}, this side {}\n",
                key.remote,
                lowest,
                highest,
                wire::VERSION
            );
        }
    }
}

impl Drop for Driver {
    /// The device goes: all objects are gone. Peers are told, then nothing comes any more, then
    /// what works by itself is stopped.
    fn drop(&mut self) {
        self.0.table.part();
        self.0.port.close();
        self.0.table.shutdown();
    }
}

impl Client for NetClient {
    fn receive(&self, skb: Skb) {
        drive::receive(&self.0, skb);
    }

    fn netdev(&self, event: NetdevEvent) {
        match event {
            NetdevEvent::Unregister => self.0.back.unregister(),
            NetdevEvent::Up | NetdevEvent::Down | NetdevEvent::Change => {
                self.0.back.port_state_changed();
            }
            NetdevEvent::Mtu | NetdevEvent::Address => {}
        }
    }

    fn closed(&self) {
        self.0.table.forget_routes();
    }

    fn planes_changed(&self) {
        self.0.table.planes_changed();
    }
}

impl Operations for Driver {
    const DRIVER_ID: u32 = DRIVER_ID;
    const ABI_VERSION: u32 = ABI_VERSION;
    const DESCRIPTION: &'static [u8] = b"metaroce";

    type Context = Context;
    type Pd = Pd;
    type Mr = Mr;
    type Cq = Cq;
    type Qp = Qp;
    type Srq = Srq;

    fn module() -> &'static ThisModule {
        ::kernel::module::this_module::<crate::Metaroce>()
    }

    fn has_netdev(&self) -> bool {
        self.0.port.is_open()
    }

    fn query_device(&self) -> DeviceAttr {
        DeviceAttr {
            // Major, minor, patch: what both ends, and both sides of the ABI, must agree on.
            fw_ver: (u64::from(wire::VERSION) << 32) | (u64::from(ABI_VERSION) << 16),
            sys_image_guid: self.0.guid,
            // No company's: the locally administered prefix of the node GUID.
            vendor_id: (self.0.guid >> 40) as u32,
            vendor_part_id: 1,
            hw_ver: u32::from(wire::VERSION),
            max_mr_size: u64::MAX,
            page_size_cap: !(::kernel::page::PAGE_SIZE as u64 - 1),
            max_qp: MAX_QP,
            max_qp_wr: MAX_WR,
            max_sge: MAX_SGE,
            max_cq: MAX_OBJECTS,
            max_cqe: MAX_CQE,
            max_mr: mem::MAX_REGIONS,
            max_pd: MAX_OBJECTS,
            max_rd_atomic: u32::from(MAX_RD_ATOMIC),
            max_srq: MAX_OBJECTS,
            max_srq_wr: MAX_WR,
            max_pkeys: 1,
            // 4.096 µs times 2^15: what a busy host may take to answer.
            local_ca_ack_delay: 15,
        }
    }

    fn query_port(&self) -> PortAttr {
        let netdev = self.0.back.netdev();
        let speed = netdev.as_ref().map_or(0, |n| n.speed());
        port::query(netdev.as_ref(), speed, self.0.port.is_operational())
    }

    fn alloc_context(&self, udata: &Udata<'_>) -> Result<Context> {
        Context::new(udata)
    }

    fn alloc_pd(&self, udata: &Udata<'_>) -> Result<Pd> {
        udata.none()?;
        Ok(Pd::new(self.0.domains.fetch_add(1, Ordering::Relaxed)))
    }

    fn reg_mr(&self, device: &RawDevice, pd: &Pd, mr: &MrAttr) -> Result<Mr> {
        Mr::new(&self.0, device, pd, mr)
    }

    fn rereg_mr(
        &self,
        device: &RawDevice,
        old: &Mr,
        pd: &Pd,
        flags: MrRereg,
        mr: &MrAttr,
    ) -> Result<Mr> {
        Mr::again(&self.0, device, old, pd, flags, mr)
    }

    fn mr_key(mr: &Mr) -> u32 {
        mr.key()
    }

    fn create_cq(
        &self,
        back: Arc<Back<bindings::ib_cq>>,
        entries: u32,
        udata: &Udata<'_>,
    ) -> Result<(Cq, u32)> {
        let number = self.0.queues.fetch_add(1, Ordering::Relaxed);
        Cq::new(back, entries, number, udata)
    }

    fn resize_cq(&self, cq: &Cq, entries: u32, udata: &Udata<'_>) -> Result<u32> {
        cq.resize(entries, udata)
    }

    fn create_srq(
        &self,
        pd: &Pd,
        back: Arc<Back<bindings::ib_srq>>,
        attr: &mut SrqAttr,
        udata: &Udata<'_>,
    ) -> Result<Srq> {
        let number = self.0.queues.fetch_add(1, Ordering::Relaxed);
        Srq::new(pd.number(), number, back, attr, udata)
    }

    fn modify_srq(&self, srq: &Srq, limit: u32) -> Result {
        srq.set_limit(limit)
    }

    fn query_srq(&self, srq: &Srq) -> SrqAttr {
        srq.query()
    }

    fn create_qp(
        &self,
        back: Arc<Back<bindings::ib_qp>>,
        init: &mut QpInit<'_, Self>,
        udata: &Udata<'_>,
    ) -> Result<(Qp, u32)> {
        Qp::new(&self.0, back, init, udata)
    }

    fn modify_qp(&self, qp: &Qp, attr: &QpAttr, mask: u32) -> Result {
        qp.modify(attr, mask)
    }

    fn query_qp(&self, qp: &Qp) -> (QpAttr, QpCap, bool) {
        qp.query()
    }

    fn destroy_qp(&self, qp: &Qp) {
        qp.destroy();
    }

    fn doorbell(&self, qp: &Qp) -> Result {
        qp.doorbell()
    }

    fn extension(&self, qp: &Qp, method: Method, arguments: &Arguments<'_>) -> Result {
        extension::call(qp, method, arguments)
    }

    fn change_planes(&self, change: Change, text: &[u8]) -> Result {
        planes::change(&self.0, change, text)
    }

    fn show_planes(&self, out: &mut dyn Write) -> fmt::Result {
        planes::show(&self.0, out)
    }

    fn choose_controller(&self, text: &[u8]) -> Result {
        planes::choose_controller(&self.0, text)
    }

    fn show_controller(&self, out: &mut dyn Write) -> fmt::Result {
        planes::show_controller(&self.0, out)
    }

    fn show_qp(&self, qp: &Qp, out: &mut Details<'_>) -> Result {
        qp.show(out)
    }

    fn show_cq(&self, cq: &Cq, out: &mut Details<'_>) -> Result {
        cq.show(out)
    }

    fn show_srq(&self, srq: &Srq, out: &mut Details<'_>) -> Result {
        srq.show(out)
    }

    fn show_mr(&self, mr: &Mr, out: &mut Details<'_>) -> Result {
        mr.show(out)
    }

    fn counters(&self) -> &'static [StatDesc] {
        Counters::names(self.0.paths())
    }

    fn read_counters(&self, values: &mut [u64]) {
        self.0.counters.read(values, |sums| {
            self.0.table.for_each(|conn| sums.add(&conn.counters()));
        });
    }
}
