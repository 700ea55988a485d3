// SPDX-License-Identifier: GPL-2.0
/*
 * helpers.c: what bindgen cannot see (static inline functions, macros), as functions and
 * constants named metaroce_<name> and METAROCE_CONST_<NAME>. bindgen runs over this file, so
 * a definition here is all that is needed; no policy lives here, one call each.
 */
#include "bindings/bindings_helper.h"

#define UVERBS_MODULE_NAME metaroce
#include <rdma/uverbs_named_ioctl.h>

/* rtnl and reference counts */
void metaroce_dev_hold(struct net_device *dev)
{
	dev_hold(dev);
}

void metaroce_dev_put(struct net_device *dev)
{
	dev_put(dev);
}

/* bottom halves */
void metaroce_local_bh_disable(void)
{
	local_bh_disable();
}

void metaroce_local_bh_enable(void)
{
	local_bh_enable();
}

/* Two places, so that lockdep tells items of softirq and process context apart. */
void metaroce_init_work(struct work_struct *work, work_func_t func, bool sleeps)
{
	if (sleeps)
		INIT_WORK(work, func);
	else
		INIT_WORK(work, func);
}

bool metaroce_work_pending(struct work_struct *work)
{
	return work_pending(work);
}

bool metaroce_queue_bh_work(struct work_struct *work)
{
	return queue_work(system_bh_wq, work);
}

bool metaroce_queue_bh_work_on(int cpu, struct work_struct *work)
{
	return queue_work_on(cpu, system_bh_wq, work);
}

bool metaroce_queue_work(struct work_struct *work)
{
	return queue_work(system_dfl_wq, work);
}

unsigned int metaroce_this_cpu(void)
{
	return raw_smp_processor_id();
}

unsigned int metaroce_cpu_ids(void)
{
	return nr_cpu_ids;
}

bool metaroce_cpu_online(unsigned int cpu)
{
	return cpu_online(cpu);
}

/* timers */
bool metaroce_hrtimer_is_queued(struct hrtimer *timer)
{
	return hrtimer_is_queued(timer);
}

s64 metaroce_hrtimer_get_expires(const struct hrtimer *timer)
{
	return ktime_to_ns(hrtimer_get_expires(timer));
}

/* network devices */
bool metaroce_ipv6_mod_enabled(void)
{
	return ipv6_mod_enabled();
}

bool metaroce_netif_running(const struct net_device *dev)
{
	return netif_running(dev);
}

bool metaroce_netif_oper_up(const struct net_device *dev)
{
	return netif_oper_up(dev);
}

bool metaroce_netdev_registered(const struct net_device *dev)
{
	return READ_ONCE(dev->reg_state) == NETREG_REGISTERED;
}

bool metaroce_netdev_is_loopback(const struct net_device *dev)
{
	return dev->flags & IFF_LOOPBACK;
}

struct net *metaroce_dev_net(const struct net_device *dev)
{
	return dev_net(dev);
}

/* the namespace that it is in now, held; NULL when that is going */
struct net *metaroce_dev_get_net(const struct net_device *dev)
{
	struct net *net;

	rcu_read_lock();
	net = maybe_get_net(dev_net_rcu(dev));
	rcu_read_unlock();
	return net;
}

void metaroce_put_net(struct net *net)
{
	put_net(net);
}

/* its first IPv4 address that is no secondary one, 0: none; under the RCU read lock */
__be32 metaroce_first_address4(const struct net_device *dev)
{
	struct in_device *in_dev = __in_dev_get_rcu(dev);
	const struct in_ifaddr *ifa;

	if (!in_dev)
		return 0;
	in_dev_for_each_ifa_rcu(ifa, in_dev) {
		if (!(ifa->ifa_flags & IFA_F_SECONDARY))
			return ifa->ifa_local;
	}
	return 0;
}

/* the first IPv6 address of global scope that nobody else has; under the RCU read lock */
bool metaroce_first_address6(const struct net_device *dev, struct in6_addr *addr)
{
	struct inet6_dev *idev = __in6_dev_get(dev);
	const struct inet6_ifaddr *ifa;
	bool found = false;

	if (!idev)
		return false;
	read_lock_bh(&idev->lock);
	list_for_each_entry(ifa, &idev->addr_list, if_list) {
		found = !(ifa->flags & IFA_F_DADFAILED) &&
			ipv6_addr_src_scope(&ifa->addr) == IPV6_ADDR_SCOPE_GLOBAL;
		if (found) {
			*addr = ifa->addr;
			break;
		}
	}
	read_unlock_bh(&idev->lock);
	return found;
}

/* constants that bindgen cannot evaluate or whose header is not listed */
const int METAROCE_CONST_CLOCK_MONOTONIC = CLOCK_MONOTONIC;
const u8 METAROCE_CONST_AF_INET = AF_INET;
const u8 METAROCE_CONST_AF_INET6 = AF_INET6;

/* sockets */
struct sock *metaroce_socket_sk(struct socket *sock)
{
	return sock->sk;
}

void *metaroce_sk_user_data(const struct sock *sk)
{
	return rcu_dereference_sk_user_data(sk);
}

/* The same value and field for both families (IPV6_PMTUDISC_PROBE == IP_PMTUDISC_PROBE). */
void metaroce_set_pmtudisc_probe(struct sock *sk)
{
	WRITE_ONCE(inet_sk(sk)->pmtudisc, IP_PMTUDISC_PROBE);
	if (sk->sk_family == AF_INET6)
		WRITE_ONCE(inet6_sk(sk)->pmtudisc, IPV6_PMTUDISC_PROBE);
}

/* routes */
bool metaroce_dst_check(struct dst_entry *dst, u32 cookie)
{
	return dst_check(dst, cookie);
}

u32 metaroce_rt6_get_cookie(const struct dst_entry *dst)
{
	return rt6_get_cookie(dst_rt6_info(dst));
}

u32 metaroce_dst_headroom(const struct dst_entry *dst)
{
	return LL_RESERVED_SPACE(dst_dev(dst)) + dst->header_len;
}

u32 metaroce_dst_dev_mtu(const struct dst_entry *dst)
{
	return READ_ONCE(dst_dev(dst)->mtu);
}

u32 metaroce_dst_dev_index(const struct dst_entry *dst)
{
	return dst_dev(dst)->ifindex;
}

bool metaroce_dst_is_loopback(const struct dst_entry *dst)
{
	return dst_dev(dst)->flags & IFF_LOOPBACK;
}

/* packets */
const gfp_t METAROCE_CONST_GFP_ATOMIC_NOWARN = GFP_ATOMIC | __GFP_NOWARN;

void metaroce_consume_skb(struct sk_buff *skb)
{
	consume_skb(skb);
}

bool metaroce_pskb_may_pull(struct sk_buff *skb, unsigned int len)
{
	return pskb_may_pull(skb, len);
}

void *metaroce_skb_network_header(const struct sk_buff *skb)
{
	return skb_network_header(skb);
}

void *metaroce_skb_transport_header(const struct sk_buff *skb)
{
	return skb_transport_header(skb);
}

void metaroce_skb_reset_network_header(struct sk_buff *skb)
{
	skb_reset_network_header(skb);
}

void metaroce_skb_reset_transport_header(struct sk_buff *skb)
{
	skb_reset_transport_header(skb);
}

/* A kept packet must not point to its device. */
struct net_device *metaroce_skb_take_dev(struct sk_buff *skb)
{
	return xchg(&skb->dev, NULL);
}

void metaroce_skb_dst_drop(struct sk_buff *skb)
{
	skb_dst_drop(skb);
}

void metaroce_skb_orphan(struct sk_buff *skb)
{
	skb_orphan(skb);
}

void *metaroce_skb_pull(struct sk_buff *skb, unsigned int len)
{
	return __skb_pull(skb, len);
}

void *metaroce_skb_push(struct sk_buff *skb, unsigned int len)
{
	return __skb_push(skb, len);
}

void *metaroce_skb_put(struct sk_buff *skb, unsigned int len)
{
	return __skb_put(skb, len);
}

void metaroce_skb_reserve(struct sk_buff *skb, unsigned int len)
{
	skb_reserve(skb, len);
}

unsigned int metaroce_skb_tailroom(const struct sk_buff *skb)
{
	return skb_tailroom(skb);
}

unsigned int metaroce_skb_nr_frags(const struct sk_buff *skb)
{
	return skb_shinfo(skb)->nr_frags;
}

unsigned int metaroce_skb_frag_size(const struct sk_buff *skb, unsigned int i)
{
	return skb_frag_size(&skb_shinfo(skb)->frags[i]);
}

void *metaroce_skb_frag_address(const struct sk_buff *skb, unsigned int i)
{
	return skb_frag_address(&skb_shinfo(skb)->frags[i]);
}

void metaroce_skb_add_rx_frag(struct sk_buff *skb, int i, struct page *page, int off, int size,
			      unsigned int truesize)
{
	skb_add_rx_frag(skb, i, page, off, size, truesize);
}

void metaroce_skb_set_shared_frag(struct sk_buff *skb)
{
	skb_shinfo(skb)->flags |= SKBFL_SHARED_FRAG;
}

void metaroce_skb_set_frag_list(struct sk_buff *skb, struct sk_buff *list)
{
	skb_shinfo(skb)->frag_list = list;
}

void metaroce_skb_set_next(struct sk_buff *skb, struct sk_buff *next)
{
	skb->next = next;
}

struct sk_buff *metaroce_skb_next(const struct sk_buff *skb)
{
	return skb->next;
}

/* It never left this machine, and its checksum would be computed where it does. */
bool metaroce_skb_is_csum_partial(const struct sk_buff *skb)
{
	return skb->ip_summed == CHECKSUM_PARTIAL;
}

u32 metaroce_skb_iif(const struct sk_buff *skb)
{
	return skb->skb_iif;
}

void metaroce_skb_set_iif(struct sk_buff *skb, u32 ifindex)
{
	skb->skb_iif = ifindex;
}

/* Ids below that of the first NAPI instance are CPUs that sent the packet. */
bool metaroce_skb_has_napi(const struct sk_buff *skb)
{
#ifdef CONFIG_NET_RX_BUSY_POLL
	return napi_id_valid(skb->napi_id);
#else
	return true;
#endif
}

void metaroce_udp_set_check(struct sk_buff *skb, __wsum sum)
{
	udp_hdr(skb)->check = csum_fold(sum) ?: CSUM_MANGLED_0;
	skb->ip_summed = CHECKSUM_NONE;
}

/* Packets on a fragment list, with headers of their own; @partial: and checksums left over. */
void metaroce_skb_set_gso_fraglist(struct sk_buff *skb, u16 size, u16 segs, bool partial)
{
	skb_shinfo(skb)->gso_type = SKB_GSO_UDP_L4 | SKB_GSO_FRAGLIST;
	skb_shinfo(skb)->gso_size = size;
	skb_shinfo(skb)->gso_segs = segs;
	if (!partial)
		skb->ip_summed = CHECKSUM_UNNECESSARY;
}

/* A packet that was received is ours, and so is its mark. */
u32 metaroce_skb_mark(const struct sk_buff *skb)
{
	return skb->mark;
}

void metaroce_skb_set_mark(struct sk_buff *skb, u32 mark)
{
	skb->mark = mark;
}

bool metaroce_skb_set_owner_sk_safe(struct sk_buff *skb, struct sock *sk)
{
	return skb_set_owner_sk_safe(skb, sk);
}

void metaroce_skb_set_l4_hash(struct sk_buff *skb, u32 hash)
{
	__skb_set_sw_hash(skb, hash, true);
}

void metaroce_skb_set_priority(struct sk_buff *skb, u32 priority)
{
	skb->priority = priority;
}

void metaroce_skb_dst_set_noref(struct sk_buff *skb, struct dst_entry *dst)
{
	skb_dst_set_noref(skb, dst);
}

u32 metaroce_rt_tos2priority(u8 tos)
{
	return rt_tos2priority(tos);
}

void metaroce_ip6_flow_hdr(struct ipv6hdr *hdr, unsigned int tclass, u32 label)
{
	ip6_flow_hdr(hdr, tclass, htonl(label));
}

void metaroce_ip6_set_addresses(struct ipv6hdr *hdr, const struct in6_addr *saddr,
				const struct in6_addr *daddr)
{
	hdr->saddr = *saddr;
	hdr->daddr = *daddr;
}

/* Lets IPv6 fragment a packet of ours, into pieces of at most @size bytes. */
void metaroce_skb_fragment6(struct sk_buff *skb, u16 size)
{
	skb->ignore_df = 1;
	IP6CB(skb)->frag_max_size = size;
}

/* RDMA core */
struct ib_ucontext *metaroce_udata_context(struct ib_udata *udata)
{
	return rdma_udata_to_uverbs_attr_bundle(udata)->context;
}

struct ib_udata *metaroce_bundle_udata(struct uverbs_attr_bundle *bundle)
{
	return &bundle->driver_udata;
}

int metaroce_udata_in_empty(struct ib_udata *udata)
{
	return ib_is_udata_in_empty(udata);
}

int metaroce_udata_none(struct ib_udata *udata)
{
	return ib_no_udata_io(udata);
}

/* 0: the GID belongs to no netdev any more */
u32 metaroce_gid_ifindex(const struct ib_gid_attr *attr)
{
	struct net_device *ndev;
	u32 index = 0;

	rcu_read_lock();
	ndev = rcu_dereference(attr->ndev);
	if (ndev)
		index = ndev->ifindex;
	rcu_read_unlock();
	return index;
}

/* the netdev that the device is over, held */
struct net_device *metaroce_ib_netdev(struct ib_device *dev, u32 port)
{
	struct ib_port_data *pdata = &dev->port_data[port];
	struct net_device *ndev;
	unsigned long flags;

	spin_lock_irqsave(&pdata->netdev_lock, flags);
	ndev = rcu_dereference_protected(pdata->netdev, lockdep_is_held(&pdata->netdev_lock));
	dev_hold(ndev);
	spin_unlock_irqrestore(&pdata->netdev_lock, flags);
	return ndev;
}

/* the same or, for a VLAN, the netdev below it, held */
struct net_device *metaroce_ib_real_netdev(struct ib_device *dev, u32 port)
{
	struct net_device *ndev = metaroce_ib_netdev(dev, port);
	struct net_device *real = ndev;

	if (ndev && is_vlan_dev(ndev)) {
		real = vlan_dev_real_dev(ndev);
		dev_hold(real);
		dev_put(ndev);
	}
	return real;
}

/* whether the GID belongs to the netdev that its device is over, or to one above that */
bool metaroce_gid_is_ours(const struct ib_gid_attr *attr)
{
	struct net_device *own = metaroce_ib_netdev(attr->device, attr->port_num);
	struct net_device *ndev;
	bool ours;

	rcu_read_lock();
	ndev = rcu_dereference(attr->ndev);
	ours = own && ndev && (ndev == own || netdev_has_upper_dev_all_rcu(own, ndev));
	rcu_read_unlock();
	dev_put(own);
	return ours;
}

/* registered memory */
size_t metaroce_umem_pages(struct ib_umem *umem, struct page **pages, size_t max)
{
	struct sg_page_iter iter;
	size_t n = 0;

	for_each_sgtable_page(&umem->sgt_append.sgt, &iter, 0) {
		if (n == max)
			break;
		pages[n++] = sg_page_iter_page(&iter);
		if (!(n % 65536))
			cond_resched();
	}
	return n;
}

void metaroce_get_page(struct page *page)
{
	get_page(page);
}

void metaroce_put_page(struct page *page)
{
	put_page(page);
}

void *metaroce_kmap_local(struct page *page)
{
	return kmap_local_page(page);
}

void metaroce_kunmap_local(void *addr)
{
	kunmap_local(addr);
}

void metaroce_xa_init_alloc(struct xarray *xa)
{
	xa_init_flags(xa, XA_FLAGS_ALLOC1);
}

/* Reserves an index: it reads as NULL until something is stored there. */
int metaroce_xa_reserve_cyclic(struct xarray *xa, u32 *id, u32 min, u32 max, u32 *next)
{
	return xa_alloc_cyclic(xa, id, NULL, XA_LIMIT(min, max), next, GFP_KERNEL);
}

void metaroce_xa_store(struct xarray *xa, u32 id, void *entry)
{
	xa_store(xa, id, entry, GFP_KERNEL);
}

void metaroce_xa_erase(struct xarray *xa, u32 id)
{
	xa_erase(xa, id);
}

void *metaroce_xa_load(struct xarray *xa, u32 id)
{
	return xa_load(xa, id);
}

void metaroce_kfree_rcu(void *p)
{
	kvfree_rcu_mightsleep(p);
}

/*
 * rings: as vmalloc_user(), but counted for the control group of the program; one page, of which
 * most rings of many QPs are, without an area of vmalloc
 */
void *metaroce_ring_alloc(size_t size)
{
	gfp_t gfp = GFP_KERNEL_ACCOUNT | __GFP_ZERO | __GFP_NOWARN;

	if (size == PAGE_SIZE)
		return (void *)__get_free_page(gfp);
	return __vmalloc(size, gfp);
}

void metaroce_ring_free(void *memory)
{
	if (is_vmalloc_addr(memory))
		vfree(memory);
	else
		free_page((unsigned long)memory);
}

/* What remap_vmalloc_range() does, which takes memory of vmalloc_user() only. */
int metaroce_ring_map(struct vm_area_struct *vma, void *memory, size_t size)
{
	struct page *page;
	unsigned long done;
	int r;

	if (vma->vm_end - vma->vm_start != size)
		return -EINVAL;
	for (done = 0; done < size; done += PAGE_SIZE) {
		if (is_vmalloc_addr(memory))
			page = vmalloc_to_page(memory + done);
		else
			page = virt_to_page(memory + done);
		r = vm_insert_page(vma, vma->vm_start + done, page);
		if (r)
			return r;
	}
	vm_flags_set(vma, VM_DONTEXPAND | VM_DONTDUMP);
	return 0;
}

bool metaroce_vma_is_shared(struct vm_area_struct *vma)
{
	return vma->vm_flags & VM_SHARED;
}

/* netdevs, for port attributes */
bool metaroce_netdev_is_ether(const struct net_device *dev)
{
	return dev->type == ARPHRD_ETHER && dev->addr_len == ETH_ALEN &&
	       !(dev->flags & IFF_LOOPBACK);
}

u64 metaroce_netdev_mac(const struct net_device *dev)
{
	return ether_addr_to_u64(dev->dev_addr);
}

/* Mbit/s, 0: unknown; takes the rtnl lock */
u32 metaroce_netdev_speed(struct net_device *dev)
{
	struct ethtool_link_ksettings settings = {};
	int ret = -ENODEV;

	rtnl_lock();
	if (dev->reg_state == NETREG_REGISTERED)
		ret = __ethtool_get_link_ksettings(dev, &settings);
	rtnl_unlock();
	if (ret || settings.base.speed == (u32)SPEED_UNKNOWN)
		return 0;
	return settings.base.speed;
}

/* veth, bridges and the like name a speed that nothing has to do with */
bool metaroce_netdev_has_line(const struct net_device *dev)
{
	return dev->dev.parent || is_vlan_dev(dev) || netif_is_bond_master(dev);
}

bool metaroce_ib_device_try_get(struct ib_device *dev)
{
	return ib_device_try_get(dev);
}

struct nlattr *metaroce_nest_driver_start(struct sk_buff *msg)
{
	return nla_nest_start(msg, RDMA_NLDEV_ATTR_DRIVER);
}

void metaroce_nla_nest_end(struct sk_buff *msg, struct nlattr *nest)
{
	nla_nest_end(msg, nest);
}

void metaroce_nla_nest_cancel(struct sk_buff *msg, struct nlattr *nest)
{
	nla_nest_cancel(msg, nest);
}

unsigned int metaroce_online_cpus(void)
{
	return num_online_cpus();
}

/* Extensions: methods of METAROCE_OBJECT_QP (kernel_ext/ib_dv.rs) */
bool metaroce_is_net_admin(void)
{
	return capable(CAP_NET_ADMIN);
}

struct ib_qp *metaroce_bundle_qp(const struct uverbs_attr_bundle *bundle, u16 id)
{
	return uverbs_attr_get_obj(bundle, id);
}

int metaroce_bundle_len(const struct uverbs_attr_bundle *bundle, u16 id)
{
	return uverbs_attr_get_len(bundle, id);
}

int metaroce_bundle_in(const struct uverbs_attr_bundle *bundle, u16 id, void *to, size_t size)
{
	return _uverbs_copy_from_or_zero(to, bundle, id, size);
}

int metaroce_method_query(struct uverbs_attr_bundle *bundle);
int metaroce_method_modify(struct uverbs_attr_bundle *bundle);
int metaroce_method_transitions(struct uverbs_attr_bundle *bundle);

static int UVERBS_HANDLER(METAROCE_METHOD_QUERY)(struct uverbs_attr_bundle *bundle)
{
	return metaroce_method_query(bundle);
}

static int UVERBS_HANDLER(METAROCE_METHOD_MODIFY)(struct uverbs_attr_bundle *bundle)
{
	return metaroce_method_modify(bundle);
}

static int UVERBS_HANDLER(METAROCE_METHOD_TRANSITIONS)(struct uverbs_attr_bundle *bundle)
{
	return metaroce_method_transitions(bundle);
}

DECLARE_UVERBS_NAMED_METHOD(METAROCE_METHOD_QUERY,
			    UVERBS_ATTR_IDR(METAROCE_QUERY_QP, UVERBS_OBJECT_QP,
					    UVERBS_ACCESS_READ, UA_MANDATORY),
			    UVERBS_ATTR_PTR_OUT(METAROCE_QUERY_CONNECTION, UVERBS_ATTR_MIN_SIZE(8),
						UA_MANDATORY),
			    UVERBS_ATTR_PTR_IN(METAROCE_QUERY_PATH_SIZE, UVERBS_ATTR_TYPE(u32),
					       UA_OPTIONAL),
			    UVERBS_ATTR_PTR_OUT(METAROCE_QUERY_PATHS, UVERBS_ATTR_MIN_SIZE(1),
						UA_OPTIONAL));

DECLARE_UVERBS_NAMED_METHOD(METAROCE_METHOD_MODIFY,
			    UVERBS_ATTR_IDR(METAROCE_MODIFY_QP, UVERBS_OBJECT_QP,
					    UVERBS_ACCESS_READ, UA_MANDATORY),
			    UVERBS_ATTR_PTR_IN(METAROCE_MODIFY_ATTR,
					       UVERBS_ATTR_STRUCT(struct metaroce_qp_attr, events),
					       UA_MANDATORY));

DECLARE_UVERBS_NAMED_METHOD(METAROCE_METHOD_TRANSITIONS,
			    UVERBS_ATTR_IDR(METAROCE_TRANSITIONS_QP, UVERBS_OBJECT_QP,
					    UVERBS_ACCESS_READ, UA_MANDATORY),
			    UVERBS_ATTR_PTR_IN(METAROCE_TRANSITIONS_FROM, UVERBS_ATTR_TYPE(u64),
					       UA_MANDATORY),
			    UVERBS_ATTR_PTR_IN(METAROCE_TRANSITIONS_SIZE, UVERBS_ATTR_TYPE(u32),
					       UA_MANDATORY),
			    UVERBS_ATTR_PTR_OUT(METAROCE_TRANSITIONS_LIST, UVERBS_ATTR_MIN_SIZE(1),
						UA_MANDATORY),
			    UVERBS_ATTR_PTR_OUT(METAROCE_TRANSITIONS_COUNT, UVERBS_ATTR_TYPE(u32),
						UA_MANDATORY));

DECLARE_UVERBS_GLOBAL_METHODS(METAROCE_OBJECT_QP,
			      &UVERBS_METHOD(METAROCE_METHOD_QUERY),
			      &UVERBS_METHOD(METAROCE_METHOD_MODIFY),
			      &UVERBS_METHOD(METAROCE_METHOD_TRANSITIONS));

static const struct uapi_definition metaroce_definitions[] = {
	UAPI_DEF_CHAIN_OBJ_TREE_NAMED(METAROCE_OBJECT_QP),
	{},
};

void metaroce_set_definitions(struct ib_device *dev)
{
	dev->driver_def = metaroce_definitions;
}

/* Attributes of a device: its planes and what is the same for all (kernel_ext/ib_planes.rs) */
enum metaroce_plane_change {
	METAROCE_PLANE_ADD,
	METAROCE_PLANE_DEL,
	METAROCE_PLANE_DRAIN,
	METAROCE_PLANE_RESUME,
};

int metaroce_planes_change(struct ib_device *dev, enum metaroce_plane_change change,
			   const char *text, size_t len);
ssize_t metaroce_planes_show(struct ib_device *dev, char *text, size_t room);
int metaroce_controller_choose(struct ib_device *dev, const char *text, size_t len);
ssize_t metaroce_controller_show(struct ib_device *dev, char *text, size_t room);

static ssize_t list_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	return metaroce_planes_show(rdma_device_to_ibdev(dev), buf, PAGE_SIZE);
}
static DEVICE_ATTR_RO(list);

#define METAROCE_PLANE_ATTR(_name, _change)						\
static ssize_t _name##_store(struct device *dev, struct device_attribute *attr,	\
			     const char *buf, size_t count)				\
{											\
	int ret;									\
											\
	if (!capable(CAP_NET_ADMIN))							\
		return -EPERM;								\
	ret = metaroce_planes_change(rdma_device_to_ibdev(dev), _change, buf, count);	\
	return ret ?: count;								\
}											\
static DEVICE_ATTR_WO(_name)

static ssize_t controller_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	return metaroce_controller_show(rdma_device_to_ibdev(dev), buf, PAGE_SIZE);
}

static ssize_t controller_store(struct device *dev, struct device_attribute *attr,
				const char *buf, size_t count)
{
	int ret;

	if (!capable(CAP_NET_ADMIN))
		return -EPERM;
	ret = metaroce_controller_choose(rdma_device_to_ibdev(dev), buf, count);
	return ret ?: count;
}
static DEVICE_ATTR_RW(controller);

METAROCE_PLANE_ATTR(add, METAROCE_PLANE_ADD);
METAROCE_PLANE_ATTR(del, METAROCE_PLANE_DEL);
METAROCE_PLANE_ATTR(drain, METAROCE_PLANE_DRAIN);
METAROCE_PLANE_ATTR(resume, METAROCE_PLANE_RESUME);

static struct attribute *metaroce_plane_attrs[] = {
	&dev_attr_list.attr,
	&dev_attr_add.attr,
	&dev_attr_del.attr,
	&dev_attr_drain.attr,
	&dev_attr_resume.attr,
	&dev_attr_controller.attr,
	NULL,
};

static const struct attribute_group metaroce_plane_files = {
	.name = "planes",
	.attrs = metaroce_plane_attrs,
};

const struct attribute_group *metaroce_plane_group(void)
{
	return &metaroce_plane_files;
}
