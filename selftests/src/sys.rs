// SPDX-License-Identifier: GPL-2.0
//! Memory that a device may read and write, and the few system calls that std lacks.
//!
//! Unsafe because it calls C functions, and reaches memory that others change by raw pointers;
//! what it offers is safe.

use crate::ffi;
use crate::rng::{self, Mismatch};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{fence, Ordering};
use std::time::{Duration, Instant};

fn check(result: i32) -> io::Result<i32> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// A mapping that a device reads and writes behind the program's back: it is never seen
/// through a Rust reference, only copied from and to.
///
/// The address range stays mapped until the process ends (an own mapping without content
/// takes its place when a `Memory` is dropped), so an address once taken from it can be
/// read at any time.
pub struct Memory {
    addr: usize,
    len: usize,
}

// SAFETY: a Memory is an address range; accesses copy bytes, as the device does meanwhile.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn map(len: usize, flags: u32, fd: RawFd) -> io::Result<Self> {
        let len = len.max(1).next_multiple_of(4096);
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no other memory.
        let addr = unsafe {
            ffi::mmap(
                std::ptr::null_mut(),
                len as _,
                (ffi::PROT_READ | ffi::PROT_WRITE) as i32,
                flags as i32,
                fd,
                0,
            )
        };
        if addr as usize == usize::MAX {
            return Err(io::Error::last_os_error());
        }
        Ok(Memory { addr: addr as usize, len })
    }

    /// Zeroed memory of at least `len` bytes, a multiple of the page size.
    pub fn new(len: usize) -> io::Result<Self> {
        Self::map(len, ffi::MAP_PRIVATE | ffi::MAP_ANONYMOUS, -1)
    }

    /// The same from 2 MiB huge pages; fails when the machine has none to give.
    pub fn huge(len: usize) -> io::Result<Self> {
        let len = len.next_multiple_of(2 << 20);
        Self::map(len, ffi::MAP_PRIVATE | ffi::MAP_ANONYMOUS | ffi::MAP_HUGETLB | ffi::MAP_POPULATE, -1)
    }

    /// `times` mappings of the same `unit` bytes (a multiple of the page size) in a row:
    /// a large range that needs little memory.
    pub fn repeated(unit: usize, times: usize) -> io::Result<Self> {
        let unit = unit.next_multiple_of(4096);
        // SAFETY: the name is a constant C string.
        let fd = check(unsafe { ffi::memfd_create(c"selftest".as_ptr(), ffi::MFD_CLOEXEC) })?;
        // SAFETY: fd was just made and belongs to nobody else.
        let file = unsafe { File::from_raw_fd(fd) };
        file.set_len(unit as u64)?;
        let total = unit.checked_mul(times).ok_or(io::ErrorKind::InvalidInput)?;
        let whole = Self::map(total, ffi::MAP_PRIVATE | ffi::MAP_ANONYMOUS | ffi::MAP_NORESERVE, -1)?;
        for i in 0..times {
            // SAFETY: the range lies inside `whole`, which nothing else uses yet.
            let at = unsafe {
                ffi::mmap(
                    (whole.addr + i * unit) as *mut _,
                    unit as _,
                    (ffi::PROT_READ | ffi::PROT_WRITE) as i32,
                    (ffi::MAP_SHARED | ffi::MAP_FIXED) as i32,
                    file.as_raw_fd(),
                    0,
                )
            };
            if at as usize == usize::MAX {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(whole)
    }

    /// Address of the first byte.
    pub fn addr(&self) -> u64 {
        self.addr as u64
    }

    /// Bytes mapped.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for no bytes (never the case).
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "{offset} + {len} > {}",
            self.len
        );
        (self.addr + offset) as *mut u8
    }

    /// Copies `bytes` to `offset`.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        let to = self.at(offset, bytes.len());
        // SAFETY: `at` checked the range, which is mapped as long as the process lives.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
    }

    /// Copies from `offset` into `bytes`.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) {
        let from = self.at(offset, bytes.len());
        fence(Ordering::Acquire);
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) }
    }

    /// A copy of `len` bytes at `offset`.
    pub fn copy(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.read(offset, &mut out);
        out
    }

    /// Sets `len` bytes at `offset` to `byte`.
    pub fn set(&self, offset: usize, len: usize, byte: u8) {
        let to = self.at(offset, len);
        // SAFETY: as in `write`.
        unsafe { std::ptr::write_bytes(to, byte, len) }
    }

    /// The byte at `offset` as it is now; what is read afterwards is not older.
    pub fn byte(&self, offset: usize) -> u8 {
        let from = self.at(offset, 1);
        // SAFETY: as in `write`; volatile, since the device writes it.
        let value = unsafe { std::ptr::read_volatile(from) };
        fence(Ordering::Acquire);
        value
    }

    /// The aligned 64-bit word at `offset` as it is now; what is read afterwards is not older.
    pub fn word(&self, offset: usize) -> u64 {
        assert!(offset % 8 == 0);
        let from = self.at(offset, 8);
        // SAFETY: as in `byte`, and aligned.
        let value = unsafe { std::ptr::read_volatile(from.cast::<u64>()) };
        fence(Ordering::Acquire);
        value
    }

    /// Stores the aligned 64-bit word at `offset`, after everything stored before.
    pub fn set_word(&self, offset: usize, value: u64) {
        assert!(offset % 8 == 0);
        let to = self.at(offset, 8);
        fence(Ordering::Release);
        // SAFETY: as in `word`.
        unsafe { std::ptr::write_volatile(to.cast::<u64>(), value) }
    }

    /// Fills `len` bytes at `offset` with the pattern `seed`.
    pub fn fill(&self, offset: usize, len: usize, seed: u64) {
        let to = self.at(offset, len);
        let words = len / 8;
        for i in 0..words {
            // SAFETY: i * 8 + 8 <= len, which `at` checked.
            unsafe { to.add(i * 8).cast::<u64>().write_unaligned(rng::pattern_word(seed, i as u64).to_le()) }
        }
        let tail = rng::pattern_word(seed, words as u64).to_le_bytes();
        self.write(offset + words * 8, &tail[..len - words * 8]);
    }

    /// Compares `len` bytes at `offset` with the pattern `seed`; offsets of a mismatch count
    /// from `offset`.
    pub fn verify(&self, offset: usize, len: usize, seed: u64) -> Result<(), Mismatch> {
        let from = self.at(offset, len);
        fence(Ordering::Acquire);
        let words = len / 8;
        let mut equal = true;
        for i in 0..words {
            // SAFETY: i * 8 + 8 <= len, which `at` checked.
            let found = unsafe { from.add(i * 8).cast::<u64>().read_unaligned() };
            equal &= u64::from_le(found) == rng::pattern_word(seed, i as u64);
        }
        let tail = rng::pattern_word(seed, words as u64).to_le_bytes();
        equal &= self.copy(offset + words * 8, len - words * 8) == tail[..len - words * 8];
        if equal {
            return Ok(());
        }
        // Slow, with details; what arrived meanwhile shows as right, so a copy that is right
        // now is reported as such.
        let mut expected = vec![0; len];
        rng::fill(&mut expected, seed);
        match rng::compare(&self.copy(offset, len), &expected) {
            Err(mismatch) => Err(mismatch),
            Ok(()) => Err(Mismatch { offset: 0, expected: 0, found: 0, wrong: 0, last: 0 }),
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // Keeps the addresses readable and gives the pages back.
        // SAFETY: replaces this object's own range, nothing else's.
        unsafe {
            ffi::mmap(
                self.addr as *mut _,
                self.len as _,
                ffi::PROT_READ as i32,
                (ffi::MAP_PRIVATE | ffi::MAP_ANONYMOUS | ffi::MAP_NORESERVE | ffi::MAP_FIXED) as i32,
                -1,
                0,
            );
        }
    }
}

/// Waits until `fd` can be read; false after `timeout`.
pub fn wait_readable(fd: RawFd, timeout: Duration) -> io::Result<bool> {
    let end = Instant::now() + timeout;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let mut poll = ffi::pollfd { fd, events: ffi::POLLIN as i16, revents: 0 };
        // Rounded up, so that the last round does not spin.
        let ms = i32::try_from(left.as_millis() + 1).unwrap_or(i32::MAX);
        // SAFETY: one pollfd, on the stack for the duration of the call.
        match check(unsafe { ffi::poll(&mut poll, 1, ms) }) {
            Ok(0) if left.is_zero() => return Ok(false),
            Ok(0) => {}
            Ok(_) => return Ok(true),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Makes reads from `fd` return at once when there is nothing.
pub fn set_nonblocking(fd: RawFd) -> io::Result<()> {
    // SAFETY: F_GETFL takes no further argument.
    let flags = check(unsafe { ffi::fcntl(fd, ffi::F_GETFL as i32) })?;
    // SAFETY: F_SETFL takes an int.
    check(unsafe { ffi::fcntl(fd, ffi::F_SETFL as i32, flags | ffi::O_NONBLOCK as i32) })?;
    Ok(())
}

/// True on a kernel that runs as a process (ARCH=um). There each page that a process maps
/// takes a mapping of the process that the kernel is, of which the host allows 65,530.
pub fn kernel_is_process() -> bool {
    std::fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| text.contains("User Mode Linux"))
}

/// Maps `pages` pages of `fd` from page `page` on and unmaps them again; true when the driver had
/// something there that is as long as that.
pub fn probe_mmap(fd: RawFd, page: u64, pages: usize) -> bool {
    let Ok(mapped) = map_shared(fd, page, pages << 12) else { return false };
    let Memory { addr, len } = *std::mem::ManuallyDrop::new(mapped);
    // SAFETY: the mapping was made above, and nobody else knows of it.
    unsafe { ffi::munmap(addr as *mut _, len as _) };
    true
}

/// A socket that sends and receives whole Ethernet frames on one interface.
pub struct Frames {
    fd: OwnedFd,
}

impl Frames {
    /// On the interface `name`. With `listening`, all frames that the interface sends and
    /// receives can be read, except those sent by this socket; otherwise it only sends.
    pub fn open(name: &str, listening: bool) -> io::Result<Self> {
        let text = std::ffi::CString::new(name).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: a C string that lives for the call.
        let index = unsafe { ffi::if_nametoindex(text.as_ptr()) };
        if index == 0 {
            return Err(io::Error::last_os_error());
        }
        // ETH_P_ALL or nothing, in network order.
        let protocol = if listening { 3u16.to_be() } else { 0 };
        // SOCK_RAW is 3 and SOCK_CLOEXEC 0o2000000 on all that Linux runs on here.
        // SAFETY: no memory is passed.
        let fd = check(unsafe { ffi::socket(ffi::AF_PACKET as i32, 3 | 0o2000000, i32::from(protocol)) })?;
        // SAFETY: fd was just made and belongs to nobody else.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let link = ffi::sockaddr_ll {
            sll_family: ffi::AF_PACKET as u16,
            sll_protocol: protocol,
            sll_ifindex: index as i32,
            ..ffi::sockaddr_ll::default()
        };
        let size = size_of::<ffi::sockaddr_ll>() as u32;
        let address = ffi::__CONST_SOCKADDR_ARG { __sockaddr__: (&raw const link).cast() };
        // SAFETY: the kernel reads `size` bytes of the address, which lives for the call.
        check(unsafe { ffi::bind(fd.as_raw_fd(), address, size) })?;
        Ok(Frames { fd })
    }

    /// Sends a frame.
    pub fn send(&self, frame: &[u8]) -> io::Result<()> {
        // SAFETY: the kernel reads `frame`, no more.
        let n = unsafe { ffi::send(self.fd.as_raw_fd(), frame.as_ptr().cast(), frame.len() as _, 0) };
        if n < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// The next frame, or its beginning where `room` is shorter; None when there is none now.
    pub fn recv<'a>(&self, room: &'a mut [u8]) -> io::Result<Option<&'a [u8]>> {
        let flags = ffi::MSG_DONTWAIT as i32;
        // SAFETY: the kernel writes at most the length of `room` into it.
        let n = unsafe { ffi::recv(self.fd.as_raw_fd(), room.as_mut_ptr().cast(), room.len() as _, flags) };
        match usize::try_from(n) {
            Ok(n) => Ok(Some(&room[..n.min(room.len())])),
            Err(_) => match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
                e => Err(e),
            },
        }
    }
}

/// Maps `len` bytes of `fd` from page `page` on, read and write, shared.
pub fn map_shared(fd: RawFd, page: u64, len: usize) -> io::Result<Memory> {
    // SAFETY: a mapping at an address of the kernel's choice touches no other memory.
    let addr = unsafe {
        ffi::mmap(
            std::ptr::null_mut(),
            len as _,
            (ffi::PROT_READ | ffi::PROT_WRITE) as i32,
            ffi::MAP_SHARED as i32,
            fd,
            (page << 12) as _,
        )
    };
    if addr as usize == usize::MAX {
        return Err(io::Error::last_os_error());
    }
    Ok(Memory { addr: addr as usize, len })
}

/// An ioctl with a block of memory; the words of `block` at `pointers` get the address of
/// `target`, to which the kernel may write as much as it has room.
pub fn ioctl(
    fd: RawFd,
    request: u64,
    block: &mut [u64],
    pointers: &[usize],
    target: &Memory,
) -> io::Result<i32> {
    for at in pointers {
        if let Some(word) = block.get_mut(*at) {
            *word = target.addr() + (*word & 0xff8);
        }
    }
    // SAFETY: `block` lives for the call. Other memory that the kernel may write to is that of
    // `target`, which nobody sees through a reference, or not mapped.
    check(unsafe { ffi::ioctl(fd, request as _, block.as_mut_ptr()) })
}

/// Writes `bytes` to a descriptor that somebody else has.
pub fn write(fd: RawFd, bytes: &[u8]) -> io::Result<usize> {
    // SAFETY: the kernel reads `bytes`, no more.
    let n = unsafe { ffi::write(fd, bytes.as_ptr().cast(), bytes.len() as _) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// A process that `fork` has made.
pub struct Forked(i32);

impl Forked {
    /// Waits until it has ended, however it did.
    pub fn wait(self) -> io::Result<()> {
        let mut status = 0;
        loop {
            // SAFETY: the kernel writes one int.
            match check(unsafe { ffi::waitpid(self.0, &mut status, 0) }) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return result.map(drop),
            }
        }
    }
}

/// Runs `child` in a copy of this process, which ends when it returns, without running anything
/// else of the parent's. For processes of one thread: locks that another one holds stay locked in the
/// copy.
pub fn fork(child: impl FnOnce()) -> io::Result<Forked> {
    // SAFETY: no memory is passed; the copy leaves by _exit, below.
    let pid = check(unsafe { ffi::fork() })?;
    if pid == 0 {
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child));
        // SAFETY: never returns.
        unsafe { ffi::_exit(0) };
    }
    Ok(Forked(pid))
}

/// A program that this process becomes has the descriptor, too.
pub fn keep_across_exec(fd: RawFd) -> io::Result<()> {
    // SAFETY: F_SETFD takes an int.
    check(unsafe { ffi::fcntl(fd, ffi::F_SETFD as i32, 0) })?;
    Ok(())
}

/// Lets others run.
pub fn yield_now() {
    // SAFETY: no arguments, no memory.
    unsafe { ffi::sched_yield() };
}

/// Sets the soft and hard limit of locked memory of this process, in bytes.
pub fn set_memlock(bytes: u64) -> io::Result<()> {
    let limit = ffi::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: the kernel reads one rlimit.
    check(unsafe { ffi::setrlimit(ffi::__RLIMIT_MEMLOCK as _, &limit) })?;
    Ok(())
}

/// Moves the calling thread into the network namespace that `ip netns` calls `name`.
pub fn enter_netns(name: &str) -> io::Result<()> {
    let file = File::open(format!("/run/netns/{name}"))?;
    // SAFETY: a namespace descriptor and a flag; no memory.
    check(unsafe { ffi::setns(file.as_raw_fd(), ffi::CLONE_NEWNET as i32) })?;
    Ok(())
}

/// CPU time of this process so far: user and system.
pub fn cpu_time() -> Duration {
    let mut usage = ffi::rusage::default();
    // SAFETY: the kernel fills one rusage.
    if unsafe { ffi::getrusage(ffi::RUSAGE_SELF as _, &mut usage) } < 0 {
        return Duration::ZERO;
    }
    let of = |t: ffi::timeval| {
        Duration::from_secs(u64::try_from(t.tv_sec).unwrap_or(0))
            + Duration::from_micros(u64::try_from(t.tv_usec).unwrap_or(0))
    };
    of(usage.ru_utime) + of(usage.ru_stime)
}

/// Waits until `done` is true, yielding between looks; false after `timeout`.
pub fn busywait(timeout: Duration, mut done: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + timeout;
    loop {
        if done() {
            return true;
        }
        if Instant::now() >= end {
            return done();
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The name of an errno value, as far as the programs meet it.
pub fn errno_name(errno: i32) -> String {
    let known: &[(u32, &str)] = &[
        (ffi::EPERM, "EPERM"),
        (ffi::ENOENT, "ENOENT"),
        (ffi::EIO, "EIO"),
        (ffi::EAGAIN, "EAGAIN"),
        (ffi::ENOMEM, "ENOMEM"),
        (ffi::EACCES, "EACCES"),
        (ffi::EFAULT, "EFAULT"),
        (ffi::EBUSY, "EBUSY"),
        (ffi::EEXIST, "EEXIST"),
        (ffi::ENODEV, "ENODEV"),
        (ffi::EINVAL, "EINVAL"),
        (ffi::ENOSYS, "ENOSYS"),
        (ffi::EOPNOTSUPP, "EOPNOTSUPP"),
        (ffi::EPROTO, "EPROTO"),
        (ffi::EPROTONOSUPPORT, "EPROTONOSUPPORT"),
        (ffi::EBADF, "EBADF"),
        (ffi::EMSGSIZE, "EMSGSIZE"),
    ];
    known
        .iter()
        .find(|(value, _)| i64::from(*value) == i64::from(errno))
        .map_or_else(|| format!("errno {errno}"), |(_, name)| (*name).to_string())
}

/// Values of errno that the programs compare with.
pub mod errno {
    use crate::ffi;
    /// Not allowed.
    pub const EPERM: i32 = ffi::EPERM as i32;
    /// Input/output error: the device is gone.
    pub const EIO: i32 = ffi::EIO as i32;
    /// No memory, or a queue is full.
    pub const ENOMEM: i32 = ffi::ENOMEM as i32;
    /// A bad address.
    pub const EFAULT: i32 = ffi::EFAULT as i32;
    /// In use.
    pub const EBUSY: i32 = ffi::EBUSY as i32;
    /// A value that is not allowed.
    pub const EINVAL: i32 = ffi::EINVAL as i32;
    /// No room, or as many as there may be.
    pub const ENOSPC: i32 = ffi::ENOSPC as i32;
    /// In a connection already.
    pub const EISCONN: i32 = ffi::EISCONN as i32;
    /// In no connection.
    pub const ENOTCONN: i32 = ffi::ENOTCONN as i32;
    /// Not there in this kernel or library.
    pub const ENOSYS: i32 = ffi::ENOSYS as i32;
    /// Not supported.
    pub const EOPNOTSUPP: i32 = ffi::EOPNOTSUPP as i32;
    /// No such entry.
    pub const ENODATA: i32 = ffi::ENODATA as i32;
    /// The other side speaks another protocol version.
    pub const EPROTO: i32 = ffi::EPROTO as i32;
    /// Not a descriptor.
    pub const EBADF: i32 = ffi::EBADF as i32;
    /// Try again.
    pub const EAGAIN: i32 = ffi::EAGAIN as i32;
}
