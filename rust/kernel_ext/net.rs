// SPDX-License-Identifier: GPL-2.0

//! Network devices and news about them.
//!
//! C header: `include/linux/netdevice.h`.

use crate::bindings;
use ::core::{fmt, marker::PhantomPinned, ptr::NonNull};
use ::kernel::{
    error::to_result,
    prelude::*,
    sync::{rcu, Arc},
    types::{NotThreadSafe, Opaque},
};

/// The RTNL lock is held while this lives: no network device registers, unregisters or moves to
/// another namespace meanwhile.
pub struct Rtnl(NotThreadSafe);

/// Takes the RTNL lock. Process context.
pub fn rtnl() -> Rtnl {
    // SAFETY: May be called in every context that may sleep.
    unsafe { bindings::rtnl_lock() };
    Rtnl(NotThreadSafe)
}

impl Drop for Rtnl {
    fn drop(&mut self) {
        // SAFETY: Pairs with `rtnl`, in the same task (the guard is not `Send`).
        unsafe { bindings::rtnl_unlock() };
    }
}

/// A random number (`get_random_u64()`).
pub fn random_u64() -> u64 {
    // SAFETY: May be called in every context.
    unsafe { bindings::get_random_u64() }
}

/// Whether the machine speaks IPv6 at all (`ipv6.disable=1` was not given).
pub fn ipv6_enabled() -> bool {
    // SAFETY: Reads a boot parameter.
    unsafe { bindings::metaroce_ipv6_mod_enabled() }
}

/// Tells network namespaces apart. Not a reference: the namespace may have ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct NetId(NonNull<bindings::net>);

// SAFETY: Only compared, and followed where its users show that it lives.
unsafe impl Send for NetId {}
// SAFETY: As above.
unsafe impl Sync for NetId {}

impl NetId {
    /// The C object.
    pub fn as_ptr(self) -> *mut bindings::net {
        self.0.as_ptr()
    }
}

/// A reference to a network namespace, which lives as long.
pub struct Net(NetId);

impl Net {
    /// Which one it is.
    pub fn id(&self) -> NetId {
        self.0
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        // SAFETY: `self` owns one reference.
        unsafe { bindings::metaroce_put_net(self.0.as_ptr()) };
    }
}

/// Name of an interface.
#[derive(Clone, Copy)]
pub struct Name([u8; 16]);

impl ::kernel::fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.iter().take_while(|c| **c != 0) {
            write!(f, "{}", char::from(*c))?;
        }
        Ok(())
    }
}

/// A reference to a network device. Whoever keeps one drops it when the device unregisters
/// ([`NetdevEvent::Unregister`]): until then the unregistration waits.
pub struct NetDev(NonNull<bindings::net_device>);

// SAFETY: A reference may be used and dropped on every CPU.
unsafe impl Send for NetDev {}
// SAFETY: The methods only read.
unsafe impl Sync for NetDev {}

impl NetDev {
    /// Takes a reference to `dev`.
    ///
    /// # Safety
    ///
    /// `dev` is valid, and stays so during the call.
    pub unsafe fn get(dev: NonNull<bindings::net_device>) -> Self {
        // SAFETY: Guaranteed by the caller.
        unsafe { bindings::metaroce_dev_hold(dev.as_ptr()) };
        Self(dev)
    }

    /// The C object, valid as long as `self`.
    pub fn as_ptr(&self) -> *mut bindings::net_device {
        self.0.as_ptr()
    }

    fn raw(&self) -> &bindings::net_device {
        // SAFETY: `self` holds a reference. Fields that change are read as they are.
        unsafe { self.0.as_ref() }
    }

    /// The device called `name` in `net`, which lives.
    pub fn find(net: NetId, name: &CStr) -> Option<Self> {
        // SAFETY: The namespace lives, `name` is zero-terminated.
        let dev = unsafe { bindings::dev_get_by_name(net.as_ptr(), name.as_char_ptr()) };
        // The reference that was taken passes to the result.
        NonNull::new(dev).map(Self)
    }

    /// Interface index.
    pub fn index(&self) -> u32 {
        self.raw().ifindex as u32
    }

    /// Its first IPv4 address that is no secondary one, as a GID.
    pub fn ipv4(&self, _guard: &rcu::Guard) -> Option<[u8; 16]> {
        // SAFETY: `self` holds a reference, and the RCU read lock is held.
        match unsafe { bindings::metaroce_first_address4(self.as_ptr()) } {
            0 => None,
            v4 => Some(mapped(v4.to_ne_bytes())),
        }
    }

    /// Its first IPv6 address of global scope.
    pub fn ipv6(&self, _guard: &rcu::Guard) -> Option<[u8; 16]> {
        let mut addr = bindings::in6_addr::default();
        // SAFETY: `self` holds a reference, the RCU read lock is held, and `addr` is valid for
        // writing.
        let found = unsafe { bindings::metaroce_first_address6(self.as_ptr(), &mut addr) };
        // SAFETY: Every form of the address is the same 16 bytes.
        let gid = unsafe { addr.in6_u.u6_addr8 };
        found.then_some(gid)
    }

    /// Interface name.
    pub fn name(&self) -> Name {
        Name(self.raw().name)
    }

    /// Largest IP packet, in bytes.
    pub fn mtu(&self) -> u32 {
        self.raw().mtu
    }

    /// Whether the administrator has switched it on.
    pub fn is_up(&self) -> bool {
        // SAFETY: `self` holds a reference.
        unsafe { bindings::metaroce_netif_running(self.as_ptr()) }
    }

    /// Whether it is on and its link works.
    pub fn is_operational(&self) -> bool {
        // SAFETY: `self` holds a reference.
        self.is_up() && unsafe { bindings::metaroce_netif_oper_up(self.as_ptr()) }
    }

    /// Whether it is registered, and not about to go.
    pub fn is_registered(&self) -> bool {
        // SAFETY: `self` holds a reference.
        unsafe { bindings::metaroce_netdev_registered(self.as_ptr()) }
    }

    /// Whether it is in the namespace `net`, and is not about to go. Stays true as long as the
    /// RTNL lock is held.
    pub fn is_in(&self, net: NetId, _rtnl: &Rtnl) -> bool {
        // SAFETY: `self` holds a reference.
        self.is_registered() && unsafe { bindings::metaroce_dev_net(self.as_ptr()) } == net.as_ptr()
    }

    /// The namespace that it is in just now; `None` when that is going.
    pub fn hold_net(&self) -> Option<Net> {
        // SAFETY: `self` holds a reference.
        let net = unsafe { bindings::metaroce_dev_get_net(self.as_ptr()) };
        // The reference that was taken passes to the result.
        NonNull::new(net).map(|net| Net(NetId(net)))
    }

    /// Whether `upper` is this device or lies above it at any depth (VLAN, bond, bridge,
    /// macvlan).
    pub fn carries(&self, upper: DevRef<'_>) -> bool {
        let upper = upper.dev.as_ptr();
        if self.as_ptr() == upper {
            return true;
        }
        // SAFETY: `self` holds a reference, `upper` lives, and its RCU read lock is held.
        unsafe { bindings::netdev_has_upper_dev_all_rcu(self.as_ptr(), upper) }
    }
}

impl PartialEq for NetDev {
    /// Whether it is the same device.
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl Clone for NetDev {
    fn clone(&self) -> Self {
        // SAFETY: `self` holds a reference.
        unsafe { Self::get(self.0) }
    }
}

impl Drop for NetDev {
    fn drop(&mut self) {
        // SAFETY: `self` owns one reference.
        unsafe { bindings::metaroce_dev_put(self.as_ptr()) };
    }
}

/// A network device that was looked up under the RCU read lock, and is valid as long as it
/// is held.
#[derive(Clone, Copy)]
pub struct DevRef<'a> {
    dev: NonNull<bindings::net_device>,
    _guard: ::core::marker::PhantomData<&'a rcu::Guard>,
}

impl<'a> DevRef<'a> {
    /// A device, or `None` for a null pointer.
    ///
    /// # Safety
    ///
    /// `dev` is null, or a device that lives as long as the RCU read lock of `_guard` is
    /// held.
    pub(super) unsafe fn new(
        dev: *mut bindings::net_device,
        _guard: &'a rcu::Guard,
    ) -> Option<Self> {
        Some(Self {
            dev: NonNull::new(dev)?,
            _guard: ::core::marker::PhantomData,
        })
    }

    /// Whether it is the same device.
    pub fn is(self, dev: &NetDev) -> bool {
        self.dev == dev.0
    }

    /// Interface index; 0 for the loopback interface.
    pub(super) fn unless_loopback(self) -> u32 {
        // SAFETY: The device lives (type invariant).
        let (dev, loopback) = unsafe {
            (
                self.dev.as_ref(),
                bindings::metaroce_netdev_is_loopback(self.dev.as_ptr()),
            )
        };
        if loopback {
            0
        } else {
            dev.ifindex as u32
        }
    }
}

/// The device in `net` that has the IP address `gid` (IPv4-mapped for IPv4).
pub fn device_of_address<'a>(
    net: NetId,
    gid: &[u8; 16],
    guard: &'a rcu::Guard,
) -> Option<DevRef<'a>> {
    let dev = match ipv4_of(gid) {
        // SAFETY: The caller receives a packet in `net`, so it lives; the RCU read lock is
        // held.
        Some(v4) => unsafe { bindings::__ip_dev_find(net.as_ptr(), u32::from_ne_bytes(v4), false) },
        None if ipv6_enabled() => {
            let addr = in6(gid);
            // SAFETY: As above; `addr` is valid during the call.
            unsafe { bindings::ipv6_dev_find(net.as_ptr(), &addr, ::core::ptr::null_mut()) }
        }
        None => return None,
    };
    // SAFETY: Both look-ups return devices that live as long as the RCU read lock is held.
    unsafe { DevRef::new(dev, guard) }
}

/// The IPv4 address in an IPv4-mapped GID, in network order.
pub fn ipv4_of(gid: &[u8; 16]) -> Option<[u8; 4]> {
    match *gid {
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d] => Some([a, b, c, d]),
        _ => None,
    }
}

/// The GID form of an IPv4 address in network order.
pub fn mapped(v4: [u8; 4]) -> [u8; 16] {
    let [a, b, c, d] = v4;
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d]
}

/// The C form of an IPv6 address.
pub(super) fn in6(gid: &[u8; 16]) -> bindings::in6_addr {
    let mut addr = bindings::in6_addr::default();
    addr.in6_u.u6_addr8 = *gid;
    addr
}

/// What happened to a network device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetdevEvent {
    /// It was switched on.
    Up,
    /// It is being switched off.
    Down,
    /// Its state or its link changed.
    Change,
    /// It has another MTU.
    Mtu,
    /// It has another link-layer address.
    Address,
    /// It is going, or going to another namespace: give up every reference.
    Unregister,
}

/// Somebody who wants news about network devices.
pub trait Observer: Send + Sync + 'static {
    /// Something happened to `dev`. Process context, under RTNL.
    fn netdev(this: &Arc<Self>, event: NetdevEvent, dev: &NetDev);

    /// An IP address came or went. Any context but hard interrupts.
    fn addresses(this: &Arc<Self>);
}

/// What a [`Notifier`] brings.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum News {
    /// [`Observer::netdev`]; at first of all devices that are there.
    Devices,
    /// [`Observer::addresses`], of IPv4.
    Ipv4,
    /// [`Observer::addresses`], of IPv6.
    Ipv6,
}

/// A registered [`Observer`]; unregisters when dropped (process context, without RTNL).
#[pin_data(PinnedDrop)]
#[repr(C)]
pub struct Notifier<T: Observer> {
    #[pin]
    block: Opaque<bindings::notifier_block>,
    observer: Arc<T>,
    news: News,
    #[pin]
    _pin: PhantomPinned,
}

// SAFETY: The C object is only touched to register and unregister it.
unsafe impl<T: Observer> Send for Notifier<T> {}
// SAFETY: As above.
unsafe impl<T: Observer> Sync for Notifier<T> {}

/// What the kernel calls with news.
type Callback = unsafe extern "C" fn(*mut bindings::notifier_block, c_ulong, *mut c_void) -> c_int;

impl<T: Observer> Notifier<T> {
    /// Registers `observer`.
    pub fn new(observer: Arc<T>, news: News) -> impl PinInit<Self, Error> {
        try_pin_init!(&this in Self {
            observer,
            news,
            _pin: PhantomPinned,
            block <- Opaque::try_ffi_init(move |slot: *mut bindings::notifier_block| {
                let call: Callback = match news {
                    News::Devices => notify::<T>,
                    News::Ipv4 | News::Ipv6 => notify_address::<T>,
                };
                // SAFETY: `slot` is valid for writes. It is the first field of a value whose
                // other fields are initialised (they come first), and that stays where it
                // is until `drop` has unregistered it.
                to_result(unsafe {
                    slot.write(bindings::notifier_block {
                        notifier_call: Some(call),
                        ..Default::default()
                    });
                    let _ = this;
                    match news {
                        News::Devices => bindings::register_netdevice_notifier(slot),
                        News::Ipv4 => bindings::register_inetaddr_notifier(slot),
                        News::Ipv6 => bindings::register_inet6addr_notifier(slot),
                    }
                })
            }),
        })
    }
}

#[pinned_drop]
impl<T: Observer> PinnedDrop for Notifier<T> {
    fn drop(self: Pin<&mut Self>) {
        let block = self.block.get();
        // SAFETY: Registered in `new`, with the same list.
        unsafe {
            match self.news {
                News::Devices => bindings::unregister_netdevice_notifier(block),
                News::Ipv4 => bindings::unregister_inetaddr_notifier(block),
                News::Ipv6 => bindings::unregister_inet6addr_notifier(block),
            }
        };
    }
}

/// # Safety
///
/// Only called by the kernel, for a block that `Notifier::new` registered.
unsafe extern "C" fn notify<T: Observer>(
    block: *mut bindings::notifier_block,
    event: c_ulong,
    info: *mut c_void,
) -> c_int {
    let event = match event as u32 {
        bindings::netdev_cmd_NETDEV_UP => NetdevEvent::Up,
        bindings::netdev_cmd_NETDEV_DOWN => NetdevEvent::Down,
        bindings::netdev_cmd_NETDEV_CHANGE => NetdevEvent::Change,
        bindings::netdev_cmd_NETDEV_CHANGEMTU => NetdevEvent::Mtu,
        bindings::netdev_cmd_NETDEV_CHANGEADDR => NetdevEvent::Address,
        bindings::netdev_cmd_NETDEV_UNREGISTER => NetdevEvent::Unregister,
        _ => return bindings::NOTIFY_DONE as c_int,
    };
    // SAFETY: `block` is the first field of a `repr(C)` notifier, which lives while it is
    // registered.
    let observer = unsafe { &(*block.cast::<Notifier<T>>()).observer };
    // SAFETY: The notifier chain of network devices passes a valid `netdev_notifier_info`.
    let dev = unsafe { (*info.cast::<bindings::netdev_notifier_info>()).dev };
    let Some(dev) = NonNull::new(dev) else {
        return bindings::NOTIFY_DONE as c_int;
    };
    // SAFETY: The device lives during the notification.
    T::netdev(observer, event, &unsafe { NetDev::get(dev) });
    bindings::NOTIFY_DONE as c_int
}

/// # Safety
///
/// Only called by the kernel, for a block that `Notifier::new` registered.
unsafe extern "C" fn notify_address<T: Observer>(
    block: *mut bindings::notifier_block,
    _event: c_ulong,
    _info: *mut c_void,
) -> c_int {
    // SAFETY: `block` is the first field of a `repr(C)` notifier, which lives while it is
    // registered.
    T::addresses(unsafe { &(*block.cast::<Notifier<T>>()).observer });
    bindings::NOTIFY_DONE as c_int
}
