// SPDX-License-Identifier: GPL-2.0

//! Devices' places in the network: the UDP port of each namespace, which device and plane a
//! packet belongs to, and news about netdevs.
//!
//! | refusal of [`Port::open`] | errno |
//! | --- | --- |
//! | another program has the UDP port in this namespace (said in the kernel log) | EADDRINUSE |
//! | the netdev is a plane of another device | EEXIST |
//! | the netdev is going or in another namespace, or the module is going | ENODEV |
//! | it is open | EBUSY |
//! | no memory | ENOMEM |
//!
//! A packet for no device of the namespace is dropped: nobody counts it.

#![forbid(unsafe_code)]

use super::{planes::Planes, NetDev, NetdevEvent, Skb};
use crate::{
    kernel_ext::{
        bh::{self, BhWork},
        crc,
        net::{
            device_of_address, ipv6_enabled, random_u64, rtnl, DevRef, NetId, News, Notifier,
            Observer,
        },
        rcu::Rcu,
        udp::{Encap, Sock, UdpPort},
    },
    proto::{api::HEADER_MAX, wire},
};
use ::core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use ::kernel::{
    new_mutex,
    prelude::*,
    sync::{rcu, Arc, Mutex},
};

/// Where the base header tells the length of the whole header (16 bits, big-endian).
const HEADER_LEN_OFFSET: usize = 2;

/// What a device does with packets and news.
pub trait Client: Send + Sync + 'static {
    /// A packet for the device: its transport header is linear as far as it says itself how
    /// long it is, nothing else is checked yet, and it knows its plane. Softirq.
    fn receive(&self, skb: Skb);

    /// Something happened to the netdev. Process context, under RTNL. When it has
    /// unregistered ([`NetdevEvent::Unregister`]), the port is closed already, and the
    /// device has to go.
    fn netdev(&self, event: NetdevEvent);

    /// The port has just been closed. Routes are given up: they belong to the namespace, which may
    /// end next. Process context; the list of namespaces is held, RTNL may be.
    fn closed(&self);

    /// Its planes have changed, or their links and addresses, or [`Port::mark`] asked for it.
    /// Process context, no lock held.
    fn planes_changed(&self);
}

/// A random number that all devices of this machine have in common, and nobody else.
static MACHINE: AtomicU64 = AtomicU64::new(0);

/// A random name for a device, which tells [`is_of_this_machine`] where it is.
pub fn new_instance() -> u64 {
    MACHINE.load(Ordering::Relaxed) << 32 | random_u64() >> 32
}

/// Whether `instance` names a device of this machine (with 32 bits of certainty).
pub fn is_of_this_machine(instance: u64) -> bool {
    instance >> 32 == MACHINE.load(Ordering::Relaxed)
}

/// What there is of the network as long as the module is loaded.
static NETWORK: Rcu<Arc<Shared>> = Rcu::empty();

/// The module's part in the network; ends it when dropped. All ports are closed by then.
pub struct Network {
    // Dropped first: no event comes any more.
    _notifiers: KVec<Pin<KBox<Notifier<Shared>>>>,
    // Last: nobody queues the work item any more.
    _work: Work,
}

/// Stops the work item of what is shared.
struct Work(Arc<Shared>);

impl Drop for Work {
    fn drop(&mut self) {
        bh::cancel_sync(&self.0);
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        drop(NETWORK.set(None));
    }
}

/// Begins: from now on ports can be opened, on UDP port `service`. Called once, when the
/// module is loaded.
pub fn start(service: u16) -> Result<Network> {
    crc::choose();
    MACHINE.store(random_u64() >> 32, Ordering::Relaxed);
    let shared = Arc::pin_init(
        pin_init!(Shared {
            service,
            spaces <- new_mutex!(KVec::new(), "metaroce_spaces"),
            work <- bh::Item::new(),
        }),
        GFP_KERNEL,
    )?;
    let work = Work(shared.clone());
    let cell = KBox::new(shared.clone(), GFP_KERNEL)?;
    let mut notifiers = KVec::with_capacity(3, GFP_KERNEL)?;
    for news in [News::Devices, News::Ipv4, News::Ipv6] {
        if news != News::Ipv6 || ipv6_enabled() {
            let notifier = KBox::pin_init(Notifier::new(shared.clone(), news), GFP_KERNEL)?;
            notifiers.push(notifier, GFP_KERNEL)?;
        }
    }
    drop(NETWORK.set(Some(cell)));
    Ok(Network {
        _notifiers: notifiers,
        _work: work,
    })
}

fn network() -> Option<Arc<Shared>> {
    NETWORK.get(&rcu::read_lock()).cloned()
}

/// What all devices have in common. Its work item looks after planes.
#[pin_data]
pub(super) struct Shared {
    /// The UDP port of all devices.
    service: u16,
    /// Namespaces with open ports.
    #[pin]
    spaces: Mutex<KVec<Arc<Space>>>,
    #[pin]
    work: bh::Item<Self>,
}

/// A network namespace with an open UDP port.
struct Space {
    net: NetId,
    members: Arc<Members>,
    udp: UdpPort<Members>,
}

/// Links in an allocation that can be published.
type Links = KBox<KVec<Arc<Link>>>;

/// The devices of a namespace: who gets its packets. Changed under the list of namespaces.
#[pin_data]
struct Members {
    net: NetId,
    list: Rcu<KVec<Arc<Link>>>,
    /// The list before this one, empty: it has room for all links but one, so that to take one
    /// away needs no memory.
    #[pin]
    spare: Mutex<Option<Links>>,
}

/// An open [`Port`]: what it uses.
pub(super) struct Link {
    pub(super) netdev: NetDev,
    pub(super) service: u16,
    /// The netdev is a network card, or on one.
    pub(super) has_line: bool,
    space: Arc<Space>,
    client: Arc<dyn Client>,
    port: Arc<Port>,
    /// The port is closed, or about to be: no packet goes to the client any more.
    closed: AtomicBool,
    /// Its planes; none: it has one plane, the netdev. Changed under the list of namespaces.
    pub(super) planes: Rcu<Planes>,
    /// The client is to look at its planes.
    stale: AtomicBool,
}

impl Link {
    /// Its planes as they are now, listed or not.
    fn planes_now(&self) -> Planes {
        self.planes
            .get(&rcu::read_lock())
            .map_or_else(|| Planes::only(&self.netdev), Planes::again)
    }

    /// Publishes planes. The caller holds the list of namespaces.
    fn set_planes(&self, planes: Planes) -> Result {
        let cell = if planes.is_plain() {
            None
        } else {
            Some(KBox::new(planes, GFP_KERNEL)?)
        };
        drop(self.planes.set(cell));
        Ok(())
    }

    /// Looks at the links and addresses of its planes. The caller holds the list of namespaces.
    fn refresh(&self) {
        let Some(old) = self.planes.get(&rcu::read_lock()).cloned() else {
            return;
        };
        let new = old.again();
        // Without memory the next news brings it.
        if new != old && self.set_planes(new).is_ok() {
            self.stale.store(true, Ordering::Release);
        }
    }

    /// The netdev of a plane that is not the first one is going. The caller holds the list of
    /// namespaces.
    fn drop_plane(&self, netdev: &NetDev) {
        let Some(mut planes) = self.planes.get(&rcu::read_lock()).cloned() else {
            return;
        };
        if planes.remove(netdev).is_err() {
            return;
        }
        self.stale.store(true, Ordering::Release);
        if self.set_planes(planes).is_err() {
            // Its unregistration waits for us: better no planes at all.
            drop(self.planes.set(None));
            pr_warn!("{}: no memory, its planes are lost\n", self.netdev.name());
        }
    }

    /// Whether it is on the netdev with one of its planes.
    fn is_on(&self, device: DevRef<'_>, guard: &rcu::Guard) -> bool {
        device.is(&self.netdev)
            || (self.planes.get(guard)).is_some_and(|planes| planes.on(device).is_some())
    }

    /// Whether the netdev is one of its planes, beside its own netdev.
    fn has_plane(&self, netdev: &NetDev) -> bool {
        self.netdev != *netdev
            && (self.planes.get(&rcu::read_lock())).is_some_and(|planes| planes.are_on(netdev))
    }

    /// The socket to send by.
    pub(super) fn sock(&self, ipv6: bool) -> Option<Sock<'_>> {
        self.space.udp.sock(ipv6)
    }

    /// The namespace.
    pub(super) fn net(&self) -> NetId {
        self.space.net
    }
}

/// A device's place in the network; closed at first.
pub struct Port {
    link: Rcu<Arc<Link>>,
}

impl Port {
    /// A closed port.
    pub fn new() -> Result<Arc<Self>> {
        Ok(Arc::new(Self { link: Rcu::empty() }, GFP_KERNEL)?)
    }

    /// Opens the port on `netdev`, in the namespace `net`: packets begin to come to `client`.
    /// Fails with EADDRINUSE when another program has the UDP port, with ENODEV when the netdev is
    /// going or not in that namespace, with EBUSY when it is open, with EEXIST when the netdev is a
    /// plane of another device. Sleeps, takes the RTNL lock.
    pub fn open(self: &Arc<Self>, netdev: NetDev, net: NetId, client: Arc<dyn Client>) -> Result {
        let shared = network().ok_or(ENODEV)?;
        // A netdev that goes later, or moves to another namespace, finds this port. Without RTNL
        // it could have told everybody already that it leaves, and still be in the old namespace.
        let rtnl = rtnl();
        let mut spaces = shared.spaces.lock();
        if self.link.get(&rcu::read_lock()).is_some() {
            return Err(EBUSY);
        }
        if !netdev.is_in(net, &rtnl) {
            return Err(ENODEV);
        }
        if spaces.iter().any(|s| s.members.have_plane(&netdev)) {
            return Err(EEXIST);
        }
        let space = match spaces.iter().find(|s| s.net == net) {
            Some(space) => space.clone(),
            None => {
                let members = Arc::pin_init(
                    pin_init!(Members {
                        net,
                        list: Rcu::empty(),
                        spare <- new_mutex!(None, "metaroce_spare"),
                    }),
                    GFP_KERNEL,
                )?;
                spaces.reserve(1, GFP_KERNEL)?;
                let udp = UdpPort::open(net, shared.service, members.clone())
                    .inspect_err(|e| report(&netdev, shared.service, *e))?;
                let space = Arc::new(Space { net, members, udp }, GFP_KERNEL)?;
                // There is room.
                let _ = spaces.push(space.clone(), GFP_KERNEL);
                space
            }
        };
        let opened = self.publish(netdev, client, &space, shared.service);
        drop(space);
        shared.sweep(&mut spaces);
        opened
    }

    fn publish(
        self: &Arc<Self>,
        netdev: NetDev,
        client: Arc<dyn Client>,
        space: &Arc<Space>,
        service: u16,
    ) -> Result {
        let link = Arc::new(
            Link {
                has_line: netdev.has_line(),
                netdev,
                service,
                space: space.clone(),
                client,
                port: self.clone(),
                closed: AtomicBool::new(false),
                planes: Rcu::empty(),
                stale: AtomicBool::new(false),
            },
            GFP_KERNEL,
        )?;
        let cell = KBox::new(link.clone(), GFP_KERNEL)?;
        space.members.add(link)?;
        drop(self.link.set(Some(cell)));
        Ok(())
    }

    /// Closes the port and waits until nothing of the network uses the device any more.
    /// Does nothing when it is closed. Process context; sleeps.
    pub fn close(&self) {
        if let Some(shared) = network() {
            let mut spaces = shared.spaces.lock();
            self.shut();
            shared.sweep(&mut spaces);
        }
    }

    /// Takes the link away. The caller holds the list of namespaces.
    fn shut(&self) {
        if let Some(link) = self.link(&rcu::read_lock()) {
            link.closed.store(true, Ordering::Relaxed);
        }
        // Waits for the packets that are just being received or sent.
        let Some(link) = self.link.set(None) else {
            return;
        };
        drop(link.planes.set(None));
        link.client.closed();
        link.space.members.take_closed();
    }

    /// The link, when the port is open.
    pub(super) fn link<'a>(&'a self, guard: &'a rcu::Guard) -> Option<&'a Link> {
        self.link.get(guard).map(|link| &**link)
    }

    /// Changes the planes: `change` gets those of now, and the netdev called `name`. ENODEV: there
    /// is no such netdev, it is going, or the port is closed. Process context; the caller has
    /// the connections told.
    fn change_planes(
        &self,
        name: &CStr,
        change: impl FnOnce(&mut Planes, &KVec<Arc<Space>>, NetDev) -> Result,
    ) -> Result {
        let shared = network().ok_or(ENODEV)?;
        let spaces = shared.spaces.lock();
        let link = self.link.get(&rcu::read_lock()).cloned().ok_or(ENODEV)?;
        // A netdev that goes later finds its plane: the notifier takes the same lock.
        let netdev = NetDev::find(link.net(), name)
            .filter(NetDev::is_registered)
            .ok_or(ENODEV)?;
        let mut planes = link.planes_now();
        change(&mut planes, &spaces, netdev)?;
        // The reference to the link goes while the list is held; see `Shared::netdev`.
        link.set_planes(planes)
    }

    /// Adds the netdev called `name` as a plane, under `id` or the lowest one that is free;
    /// see [`Port::change_planes`]. EINVAL: it is not Ethernet-like, or there is no such id;
    /// EEXIST: a device has it already, or the id is taken; ENOSPC: there are all.
    pub fn add_plane(&self, name: &CStr, id: Option<u8>) -> Result<u8> {
        let mut added = 0;
        self.change_planes(name, |planes, spaces, netdev| {
            if !netdev.is_ether() {
                return Err(EINVAL);
            }
            let used = |s: &Arc<Space>| {
                s.members.snapshot(0, &netdev).is_some() || s.members.have_plane(&netdev)
            };
            if spaces.iter().any(used) {
                return Err(EEXIST);
            }
            added = planes.add(netdev, id)?;
            Ok(())
        })?;
        Ok(added)
    }

    /// Removes the plane on the netdev called `name`; see [`Port::change_planes`]. ENOENT: there
    /// is none; EBUSY: it is that of the device itself.
    pub fn remove_plane(&self, name: &CStr) -> Result {
        self.change_planes(name, |planes, _, netdev| planes.remove(&netdev))
    }

    /// Lets the plane on the netdev called `name` drain, or uses it again; see
    /// [`Port::change_planes`]. ENOENT: there is none.
    pub fn drain_plane(&self, name: &CStr, draining: bool) -> Result {
        self.change_planes(name, |planes, _, netdev| planes.drain(&netdev, draining))
    }

    /// The planes as they are now; `None` when the port is closed.
    pub fn planes(&self) -> Option<Planes> {
        self.link(&rcu::read_lock()).map(Link::planes_now)
    }

    /// Has the client look at its planes soon. Any context but hard interrupts.
    pub fn mark(&self) {
        if let Some(link) = self.link(&rcu::read_lock()) {
            // Not a plain store: see `bh::queue`.
            link.stale.swap(true, Ordering::AcqRel);
        }
        if let Some(shared) = network() {
            bh::queue(&shared);
        }
    }

    /// The netdev's MTU, or 0 when the port is closed.
    pub fn mtu(&self) -> u32 {
        self.link(&rcu::read_lock()).map_or(0, |l| l.netdev.mtu())
    }

    /// Whether the port is open.
    pub fn is_open(&self) -> bool {
        self.link(&rcu::read_lock()).is_some()
    }

    /// Whether the port is open, and a netdev of it up with a working link.
    pub fn is_operational(&self) -> bool {
        let guard = rcu::read_lock();
        self.link(&guard).is_some_and(|l| {
            let planes = l.planes.get(&guard).into_iter();
            l.netdev.is_operational() || planes.flat_map(Planes::iter).any(|(_, p)| p.is_up())
        })
    }
}

/// Says why the UDP port of a namespace could not be opened.
fn report(netdev: &NetDev, service: u16, e: Error) {
    if e == EADDRINUSE {
        pr_err!(
            "{}: UDP port {} is in use by another program in this network namespace (see ss -ulpn); free it, or load the module with another port\n",
            netdev.name(),
            service
        );
    } else {
        pr_err!(
            "{}: cannot open UDP port {}: error {}\n",
            netdev.name(),
            service,
            e.to_errno()
        );
    }
}

impl Shared {
    /// Closes UDP ports that no device uses. The caller holds the list.
    fn sweep(&self, spaces: &mut KVec<Arc<Space>>) {
        spaces.retain(|s| !s.members.is_empty());
    }
}

impl Observer for Shared {
    fn netdev(this: &Arc<Self>, event: NetdevEvent, dev: &NetDev) {
        if event == NetdevEvent::Unregister {
            for space in this.spaces.lock().iter() {
                space.members.each(|link| link.drop_plane(dev));
            }
        }
        // Bounded by the number of devices: each call closes or skips one.
        let mut told = 0;
        loop {
            let mut spaces = this.spaces.lock();
            let next = spaces
                .iter()
                .flat_map(|s| s.members.snapshot(told, dev))
                .next();
            let Some(link) = next else { break };
            let client = link.client.clone();
            if event == NetdevEvent::Unregister {
                link.port.shut();
                // The last reference to the link, and with it to the namespace's UDP port,
                // goes while the list is held: whoever opens a port next finds it free.
                drop(link);
                this.sweep(&mut spaces);
            } else {
                told += 1;
            }
            drop(spaces);
            client.netdev(event);
        }
        bh::queue(this);
    }

    fn addresses(this: &Arc<Self>) {
        bh::queue(this);
    }
}

impl BhWork for Shared {
    const SLEEPS: bool = true;

    fn item(&self) -> &bh::Item<Self> {
        &self.work
    }

    /// Looks at the planes of all devices, and has those told that are stale.
    fn run(this: Arc<Self>) {
        for space in this.spaces.lock().iter() {
            space.members.each(Link::refresh);
        }
        loop {
            let client = {
                let spaces = this.spaces.lock();
                let mut client = None;
                for space in spaces.iter() {
                    space.members.each(|link| {
                        if client.is_none() && link.stale.swap(false, Ordering::AcqRel) {
                            client = Some(link.client.clone());
                        }
                    });
                }
                client
            };
            let Some(client) = client else { return };
            client.planes_changed();
        }
    }
}

impl Members {
    fn is_empty(&self) -> bool {
        self.list
            .get(&rcu::read_lock())
            .is_none_or(|list| list.iter().all(|l| l.closed.load(Ordering::Relaxed)))
    }

    /// The link number `skip` of those on `dev`.
    fn snapshot(&self, skip: usize, dev: &NetDev) -> Option<Arc<Link>> {
        let guard = rcu::read_lock();
        self.list
            .get(&guard)?
            .iter()
            .filter(|l| l.netdev.as_ptr() == dev.as_ptr() && !l.closed.load(Ordering::Relaxed))
            .nth(skip)
            .cloned()
    }

    /// Calls `f`, which may sleep, for each link. The caller holds the list of namespaces.
    fn each(&self, mut f: impl FnMut(&Link)) {
        for i in 0.. {
            let link = self
                .list
                .get(&rcu::read_lock())
                .and_then(|list| list.get(i).cloned());
            let Some(link) = link else { return };
            f(&link);
        }
    }

    /// Whether `netdev` is a plane of a device, beside that device's own netdev.
    fn have_plane(&self, netdev: &NetDev) -> bool {
        let mut used = false;
        self.each(|link| used |= link.has_plane(netdev));
        used
    }

    /// Adds a link. The caller holds the list of namespaces.
    fn add(&self, link: Arc<Link>) -> Result {
        let mut spare = self.spare.lock();
        let len = self.list.get(&rcu::read_lock()).map_or(0, |l| l.len());
        let mut list = match spare.take_if(|spare| spare.capacity() > len) {
            Some(list) => list,
            None => KBox::new(KVec::with_capacity(len + 1, GFP_KERNEL)?, GFP_KERNEL)?,
        };
        self.copy_to(&mut list);
        let _ = list.push_within_capacity(link);
        self.publish(&mut spare, Some(list));
        Ok(())
    }

    /// Takes away the links that are closed. The caller holds the list of namespaces.
    fn take_closed(&self) {
        let mut spare = self.spare.lock();
        let mut list = spare.take();
        if let Some(list) = &mut list {
            self.copy_to(list);
        }
        self.publish(&mut spare, list);
    }

    /// Copies the links that are not closed to `list`, which is empty and has room for them.
    fn copy_to(&self, list: &mut KVec<Arc<Link>>) {
        let guard = rcu::read_lock();
        let links = self.list.get(&guard).into_iter().flat_map(|l| l.iter());
        for link in links.filter(|l| !l.closed.load(Ordering::Relaxed)) {
            let _ = list.push_within_capacity(link.clone());
        }
    }

    /// Publishes `list` and keeps the memory of the old one.
    fn publish(&self, spare: &mut Option<Links>, list: Option<Links>) {
        *spare = self.list.set(list);
        if let Some(spare) = spare {
            spare.clear();
        }
    }

    /// Which device a packet belongs to. With one device there is no question. Otherwise
    /// the one one of whose netdevs has the destination address (a packet may come in by another
    /// one, or by the loopback interface), the netdev it came in by deciding between equal
    /// addresses (link-local ones of a NIC and its VLANs).
    fn find<'a>(
        &self,
        list: &'a [Arc<Link>],
        skb: &Skb,
        device: Option<DevRef<'_>>,
        guard: &rcu::Guard,
    ) -> Option<&'a Arc<Link>> {
        if let [only] = list {
            return Some(only);
        }
        let gid = skb.destination();
        let owner = device_of_address(self.net, &gid, guard);
        // The same netdev beats one below it.
        for dev in [device.filter(|_| is_link_local(&gid)), owner, device] {
            let Some(dev) = dev else { continue };
            if let Some(link) = list.iter().find(|l| l.is_on(dev, guard)) {
                return Some(link);
            }
            if let Some(link) = list.iter().find(|l| l.netdev.carries(dev)) {
                return Some(link);
            }
        }
        None
    }
}

fn is_link_local(gid: &[u8; 16]) -> bool {
    matches!(*gid, [0xfe, b, ..] if b & 0xc0 == 0x80)
}

impl Encap for Members {
    fn receive(&self, mut skb: Skb, device: Option<DevRef<'_>>) {
        let guard = rcu::read_lock();
        let Some(list) = self.list.get(&guard) else {
            return;
        };
        if !pull_header(&mut skb) {
            return;
        }
        if let Some(link) = self.find(list, &skb, device, &guard) {
            if !link.closed.load(Ordering::Relaxed) {
                skb.set_plane(match (link.planes.get(&guard), device) {
                    (Some(planes), Some(device)) => planes.of(device),
                    _ => 0,
                });
                link.client.receive(skb);
            }
        }
    }
}

/// Makes the transport header linear, as far as it says how long it is. `false` without
/// memory.
fn pull_header(skb: &mut Skb) -> bool {
    let have = skb.linear().len();
    if have == skb.len() as usize {
        return true;
    }
    let base = (wire::BASE_LEN as u32).min(skb.len());
    if have < wire::BASE_LEN && !skb.pull(base) {
        return false;
    }
    let told = skb
        .linear()
        .get(HEADER_LEN_OFFSET..)
        .and_then(|b| b.first_chunk())
        .map_or(0, |b| u32::from(u16::from_be_bytes(*b)));
    let want = told.min(HEADER_MAX as u32).min(skb.len());
    skb.linear().len() >= want as usize || skb.pull(want)
}
