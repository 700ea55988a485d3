-- SPDX-License-Identifier: GPL-2.0
--
-- metaroce.lua: dissector of MetaRoCE, wire version 0 (rust/proto/PROTOCOL.md), for Wireshark
-- and tshark 4.4 or later (Lua 5.4):
--
--   tshark -X lua_script:metaroce.lua -r FILE -V
--   cp metaroce.lua ~/.local/lib/wireshark/plugins/       for Wireshark
--
-- Packets are found by the UDP port (preference, default 4795), and on other ports by what
-- they look like. A capture taken where a host sends may hold several packets in one datagram
-- (the network card, or the last step of the stack, cuts them apart): they are shown one by one.
--
-- Filters: metaroce.malformed is what a receiver drops by its form, metaroce.crc.bad what it
-- drops as damaged, metaroce.resent what was on the wire before.
--
-- rust/proto/wire/dissector.rs compares all of this with what the module's own code writes and
-- reads.

local metaroce = Proto("metaroce", "MetaRoCE")

metaroce.prefs.port = Pref.uint("UDP port", 4795, "Service port of the hosts (module parameter 'port')")
metaroce.prefs.crc = Pref.bool("Check the CRC32C", true, "Compute the CRC of each packet and compare it")
metaroce.prefs.heuristic =
    Pref.bool("Find packets on other ports", true, "Look for packets of MetaRoCE in all UDP datagrams")

local BASE_LEN = 16
local HEADER_MAX = 512
local MAX_MESSAGE = 0x80000000
local QUERIES_MAX = 40
local PATHS_MAX = 64
local PLANES_MAX = 8

local DATA, ACK, PROBE, PROBE_REPLY, QUERY, CLOSE, PLANES = 0, 1, 2, 3, 4, 5, 6
local INIT, COOKIE, ACCEPT, REFUSE, UNKNOWN = 8, 9, 10, 11, 12
local TYPES = {
    [DATA] = "Data", [ACK] = "Ack", [PROBE] = "Probe", [PROBE_REPLY] = "ProbeReply", [QUERY] = "Query",
    [CLOSE] = "Close", [PLANES] = "Planes", [INIT] = "Init", [COOKIE] = "Cookie", [ACCEPT] = "Accept",
    [REFUSE] = "Refuse", [UNKNOWN] = "Unknown",
}

local VOID, WRITE, WRITE_IMM, SEND, SEND_IMM, SEND_INV = 0, 1, 2, 3, 4, 5
local READ_REQUEST, COMPARE_SWAP, FETCH_ADD, READ_RESPONSE, ATOMIC_RESPONSE = 6, 7, 8, 9, 10
local OPCODES = {
    [VOID] = "VOID", [WRITE] = "Write", [WRITE_IMM] = "WriteImm", [SEND] = "Send", [SEND_IMM] = "SendImm",
    [SEND_INV] = "SendInv", [READ_REQUEST] = "ReadRequest", [COMPARE_SWAP] = "CompareSwap",
    [FETCH_ADD] = "FetchAdd", [READ_RESPONSE] = "ReadResponse", [ATOMIC_RESPONSE] = "AtomicResponse",
}

local FLAG_ACK_REQUEST, FLAG_LAST, FLAG_SOLICITED, FLAG_AFTER = 1, 2, 4, 8
local FLAGS_ALL = 15

local STATUS = { [0] = "ok", "RNR", "NOT_READY", "NO_ROOM", "FATAL" }
local FAULTS = { "invalid request", "access", "operation" }
local DIRECTIONS = { [0] = "requests", "responses" }
local CLOSES = { [0] = "request", "agree", "refuse" }
local REASONS = { [0] = "not yet", "version" }
local CRC_STATUS = { [0] = "wrong", "good", "not agreed on", "not checked" }
local CRC_BAD, CRC_GOOD, CRC_ABSENT, CRC_UNCHECKED = 0, 1, 2, 3

-- Fields. F.NAME is the field metaroce.NAME (with _ for . in it).
local F = {}
local function add(name, field)
    F[name:gsub("%.", "_")] = field
end
local function number(kind, name, label, display, values, mask, about)
    add(name, ProtoField[kind]("metaroce." .. name, label, display or base.DEC, values, mask, about))
end
local function flag(name, label, mask, about)
    add(name, ProtoField.bool("metaroce." .. name, label, 8, nil, mask, about))
end
local function u8(name, label, values, display, mask)
    number("uint8", name, label, display, values, mask)
end

u8("version", "Version", nil, base.DEC, 0xf0)
u8("type", "Type", TYPES, base.DEC, 0x0f)
u8("flags", "Flags", nil, base.HEX)
flag("flags.ack_request", "Acknowledgement wanted", FLAG_ACK_REQUEST)
flag("flags.last", "Last packet of its message", FLAG_LAST)
flag("flags.solicited", "Solicited", FLAG_SOLICITED)
flag("flags.after", "'after' present", FLAG_AFTER)
number("uint16", "header_length", "Header length")
number("uint32", "crc", "CRC32C", base.HEX)
u8("crc.status", "CRC status", CRC_STATUS)
number("uint64", "connection", "Connection of the receiver", base.HEX)

u8("path", "Path")
u8("opcode", "Opcode", OPCODES)
number("uint16", "epoch", "Epoch")
number("uint32", "sequence", "Path sequence")
number("uint32", "timestamp", "Timestamp", nil, nil, nil, "Of this transmission, in units of 64 ns")
u8("round", "Round")
number("uint24", "dst_qp", "Destination QP", base.HEX)
number("uint24", "src_qp", "Source QP", base.HEX)
number("uint32", "stream_sequence", "Stream sequence")
number("uint32", "message", "Message")
number("uint32", "receive_message", "Receive message")
number("uint32", "request", "Request")
number("uint32", "offset", "Offset")
number("uint32", "total", "Message length")
number("uint64", "address", "Address", base.HEX)
number("uint32", "key", "Remote key", base.HEX)
number("uint32", "immediate", "Immediate", base.HEX)
number("uint32", "invalidate", "Key to invalidate", base.HEX)
number("uint32", "after", "After", nil, nil, nil, "Copied when all stream sequences up to this are in place")
number("uint32", "oldest", "Oldest unfinished request")
number("uint64", "compare", "Compare", base.HEX)
number("uint64", "add", "Add", base.HEX)
number("uint64", "original", "Original value", base.HEX)
number("uint64", "swap", "Swap", base.HEX)
add("payload", ProtoField.bytes("metaroce.payload", "Payload"))
u8("zero", "Zero", nil, base.HEX)

number("uint32", "ack.number", "Acknowledgement")
number("uint32", "ack.share", "Share", nil, nil, nil, "kbit/s; 0 is no limit")
u8("ack.path_blocks", "Path blocks")
u8("ack.stream_blocks", "Stream blocks")
u8("ack.plane", "Plane of the share")
number("uint8", "ack.lateness", "Lateness of timers", nil, nil, nil, "In units of 2^16 ns")

u8("ack.path", "Path")
u8("ack.path.words", "Words")
number("uint16", "ack.path.epoch", "Epoch")
number("uint32", "ack.path.cumulative", "Cumulative")
number("uint32", "ack.path.echo", "Echo", nil, nil, nil, "Greatest timestamp that has arrived, 64 ns")
number("uint16", "ack.path.delay", "Delay", nil, nil, nil, "From its arrival to this block, 1024 ns")
number("uint16", "ack.path.received", "Packets received")
number("uint16", "ack.path.ce", "Packets marked CE")
number("uint16", "ack.path.duplicates", "Duplicates")
number("uint64", "ack.path.bits", "Arrived above", base.HEX)
add("ack.path.missing", ProtoField.string("metaroce.ack.path.missing", "Missing"))

flag("ack.stream.limit_known", "Receive limit known", 2)
flag("ack.stream.response", "Stream of responses", 1)
number("uint24", "ack.stream.dst_qp", "QP that reads this", base.HEX)
u8("ack.stream.status", "Status", STATUS)
number("uint24", "ack.stream.src_qp", "QP that says it", base.HEX)
number("uint32", "ack.stream.cumulative", "Cumulative")
number("uint32", "ack.stream.messages", "Messages done")
number("uint32", "ack.stream.limit", "Receive limit")
number("uint32", "ack.stream.receive_message", "Receive message")
number("uint32", "ack.stream.message", "Message that failed")
number("uint32", "ack.stream.zero", "Zero", base.HEX)
u8("ack.stream.round", "Round")
number("uint24", "ack.stream.timer", "RNR timer", nil, nil, nil, "In µs")
number("uint24", "ack.stream.zero24", "Zero", base.HEX)
number("uint32", "ack.stream.fault", "Fault", base.DEC, FAULTS)

number("uint8", "probe.deaf", "Deaf", nil, nil, nil, "Times of silence in which its sender has heard nothing")
number("uint32", "probe.next", "Next path sequence")
number("uint64", "probe.challenge", "Challenge", base.HEX)
number("uint32", "probe.padding", "Padding bytes")
add("probe.pad", ProtoField.bytes("metaroce.probe.pad", "Padding"))

u8("query.count", "Queries")
add("query.reserved", ProtoField.bytes("metaroce.query.reserved", "Reserved"))
u8("query.direction", "Direction", DIRECTIONS)
number("uint24", "query.dst_qp", "QP asked", base.HEX)
u8("query.round", "Round")
number("uint24", "query.src_qp", "QP that asks", base.HEX)
number("uint32", "query.stream_sequence", "Stream sequence")

number("uint32", "close.kind", "Close", base.DEC, CLOSES)
number("uint32", "close.number", "Number")

number("uint32", "planes.number", "Number of the announcement")
number("uint32", "planes.known", "Newest known of the receiver's")
u8("planes.count", "Planes")
u8("planes.zero", "0")
u8("planes.id", "Plane")
u8("planes.flags", "Flags", { [0] = "none", "draining" })
number("uint16", "planes.zero16", "0")
add("planes.gid", ProtoField.ipv6("metaroce.planes.gid", "GID"))

add("source", ProtoField.ipv6("metaroce.source", "GID of the sender"))
add("destination", ProtoField.ipv6("metaroce.destination", "GID of the receiver"))
u8("dscp", "DSCP")
u8("lowest", "Lowest version")
u8("highest", "Highest version")
u8("paths", "Paths")
number("uint32", "features", "Features", base.HEX)
add("features.crc", ProtoField.bool("metaroce.features.crc", "CRC", 32, nil, 1))
add("features.zero_checksum6", ProtoField.bool("metaroce.features.zero_checksum6", "UDP checksum 0 on IPv6", 32, nil, 2))
number("uint32", "payload_mtu", "Payload of a full packet")
number("uint64", "sender_connection", "Connection of the sender", base.HEX)
number("uint64", "peer_connection", "Connection from the Init", base.HEX)
number("uint64", "nonce", "Nonce", base.HEX)
number("uint64", "instance", "Instance", base.HEX)
number("uint64", "cookie", "Cookie", base.HEX)
number("uint32", "cookie_time", "Time of the cookie", nil, nil, nil, "In units of 2^30 ns")
add("reserved", ProtoField.bytes("metaroce.reserved", "Reserved"))
u8("reason", "Reason", REASONS)
number("uint64", "unknown", "Connection that is unknown", base.HEX)

local list = {}
for _, field in pairs(F) do
    list[#list + 1] = field
end
metaroce.fields = list

local E = {
    malformed = ProtoExpert.new("metaroce.malformed", "Malformed packet", expert.group.MALFORMED, expert.severity.ERROR),
    crc = ProtoExpert.new("metaroce.crc.bad", "Wrong CRC", expert.group.CHECKSUM, expert.severity.ERROR),
    cut = ProtoExpert.new("metaroce.cut", "Captured in part", expert.group.UNDECODED, expert.severity.NOTE),
    resent = ProtoExpert.new("metaroce.resent", "Sent before", expert.group.SEQUENCE, expert.severity.NOTE),
    refused = ProtoExpert.new("metaroce.refused", "The receiver refuses", expert.group.RESPONSE_CODE, expert.severity.NOTE),
    failed = ProtoExpert.new("metaroce.failed", "The stream has failed", expert.group.RESPONSE_CODE, expert.severity.WARN),
}
metaroce.experts = { E.malformed, E.crc, E.cut, E.resent, E.refused, E.failed }

-- CRC32C

local crc_table = {}
for i = 0, 255 do
    local c = i
    for _ = 1, 8 do
        c = (c & 1) ~= 0 and (c >> 1) ~ 0x82f63b78 or c >> 1
    end
    crc_table[i] = c
end

local function crc_update(crc, bytes)
    local t, byte = crc_table, string.byte
    for i = 1, #bytes do
        crc = t[(crc ~ byte(bytes, i)) & 0xff] ~ (crc >> 8)
    end
    return crc
end

-- CRC of a packet, its own field taken as 0.
local function crc_of(bytes)
    local crc = crc_update(0xffffffff, bytes:sub(1, 4))
    crc = crc_update(crc, "\0\0\0\0")
    return crc_update(crc, bytes:sub(9)) ~ 0xffffffff
end

-- Reading a header: fields one after the other, and an end.

local Short = {}
local Malformed = {}
Malformed.__index = Malformed
local function malformed(text)
    error(setmetatable({ text = text }, Malformed), 0)
end

local Reader = {}
Reader.__index = Reader

local function reader(tvb, at, stop, tree)
    return setmetatable({ tvb = tvb, at = at, stop = stop, tree = tree }, Reader)
end

-- The next n bytes.
function Reader:range(n)
    if self.at + n > self.stop then
        error(Short, 0)
    end
    local range = self.tvb(self.at, n)
    self.at = self.at + n
    return range
end

-- A field of n bytes; its value, unless it is longer than 4 bytes, and its item.
function Reader:field(field, n, tree)
    local range = self:range(n)
    local item = (tree or self.tree):add(field, range)
    return n <= 4 and range:uint() or nil, item, range
end

-- A part of the tree that grows to what is read for it.
function Reader:branch(text)
    local branch = self.tree:add(self.tvb(self.at, 0), text)
    return branch, self.at
end

-- Blocks of an acknowledgement.

local function path_block(r)
    local branch, from = r:branch("Path block")
    local path = r:field(F.ack_path, 1, branch)
    local words = r:field(F.ack_path_words, 1, branch)
    if words > 4 then
        malformed("more than 4 words in a path block")
    end
    local epoch = r:field(F.ack_path_epoch, 2, branch)
    local cumulative = r:field(F.ack_path_cumulative, 4, branch)
    r:field(F.ack_path_echo, 4, branch)
    r:field(F.ack_path_delay, 2, branch)
    r:field(F.ack_path_received, 2, branch)
    r:field(F.ack_path_ce, 2, branch)
    r:field(F.ack_path_duplicates, 2, branch)
    -- What is missing: the gaps below the highest number that has arrived.
    local missing, gap = {}, cumulative
    local function run(upto)
        if gap and gap < upto then
            local a, b = gap & 0xffffffff, (upto - 1) & 0xffffffff
            missing[#missing + 1] = a == b and tostring(a) or a .. "-" .. b
        end
    end
    local first = r.at
    for word = 0, words - 1 do
        local _, _, range = r:field(F.ack_path_bits, 8, branch)
        for bit = 0, 63 do
            if range(7 - bit // 8, 1):uint() & (1 << bit % 8) ~= 0 then
                local this = cumulative + 1 + word * 64 + bit
                run(this)
                gap = this + 1
            end
        end
    end
    if words > 0 then
        branch:add(F.ack_path_missing, r.tvb(first, words * 8), table.concat(missing, " ")):set_generated()
    end
    branch:set_len(r.at - from)
    branch:append_text(string.format(": path %d epoch %d below %d", path, epoch, cumulative))
end

local function stream_block(r)
    local branch, from = r:branch("Stream block")
    local head = r:range(1)
    branch:add(F.ack_stream_limit_known, head)
    branch:add(F.ack_stream_response, head)
    if head:uint() & ~3 ~= 0 then
        malformed("bits that mean nothing in a stream block")
    end
    local dst = r:field(F.ack_stream_dst_qp, 3, branch)
    local status, item = r:field(F.ack_stream_status, 1, branch)
    local src = r:field(F.ack_stream_src_qp, 3, branch)
    local cumulative = r:field(F.ack_stream_cumulative, 4, branch)
    r:field(F.ack_stream_messages, 4, branch)
    r:field(F.ack_stream_limit, 4, branch)
    if status == 1 then
        r:field(F.ack_stream_receive_message, 4, branch)
        r:field(F.ack_stream_round, 1, branch)
        r:field(F.ack_stream_timer, 3, branch)
    elseif status == 2 or status == 3 then
        r:field(F.ack_stream_zero, 4, branch)
        r:field(F.ack_stream_round, 1, branch)
        r:field(F.ack_stream_zero24, 3, branch)
    elseif status == 4 then
        r:field(F.ack_stream_message, 4, branch)
        local fault = r:field(F.ack_stream_fault, 4, branch)
        if not FAULTS[fault] then
            malformed("a fault that does not exist")
        end
        item:add_proto_expert_info(E.failed)
    elseif status ~= 0 then
        r:range(8)
        malformed("a status that does not exist")
    end
    if status >= 1 and status <= 3 then
        item:add_proto_expert_info(E.refused)
    end
    branch:set_len(r.at - from)
    branch:append_text(string.format(": QP 0x%06x of 0x%06x, below %d, %s", dst, src, cumulative, STATUS[status]))
end

local function ack_body(r)
    r:field(F.ack_number, 4)
    r:field(F.ack_share, 4)
    local paths = r:field(F.ack_path_blocks, 1)
    local streams = r:field(F.ack_stream_blocks, 1)
    r:field(F.ack_plane, 1)
    r:field(F.ack_lateness, 1)
    for _ = 1, paths do
        path_block(r)
    end
    for _ = 1, streams do
        stream_block(r)
    end
    return string.format("%d paths, %d streams", paths, streams)
end

local function probe_body(r)
    local path = r:field(F.path, 1)
    r:field(F.probe_deaf, 1)
    local epoch = r:field(F.epoch, 2)
    r:field(F.probe_next, 4)
    r:field(F.timestamp, 4)
    r:field(F.probe_challenge, 8)
    local padding = r:field(F.probe_padding, 4)
    return string.format("path %d epoch %d", path, epoch), padding
end

local function endpoints(r)
    r:field(F.source, 16)
    r:field(F.destination, 16)
    if r:field(F.dscp, 1) > 63 then
        malformed("a DSCP above 63")
    end
end

-- What each type has behind the base header. They return what the list of packets shows and a
-- function that says whether a payload of so many bytes fits (none: nothing but 0 does), and
-- as what it is shown.
local bodies = {}

bodies[DATA] = function(r, flags)
    if flags & ~FLAGS_ALL ~= 0 then
        malformed("flags that mean nothing")
    end
    local path = r:field(F.path, 1)
    local opcode = r:field(F.opcode, 1)
    if not OPCODES[opcode] then
        malformed("an opcode that does not exist")
    end
    local epoch = r:field(F.epoch, 2)
    local sequence, item = r:field(F.sequence, 4)
    r:field(F.timestamp, 4)
    r.number = { path, epoch, sequence, item }
    local text = string.format("%s path %d/%d #%d", OPCODES[opcode], path, epoch, sequence)
    if opcode == VOID then
        if flags & ~FLAG_ACK_REQUEST ~= 0 then
            malformed("flags that mean nothing in VOID")
        end
        return text
    end
    local last = flags & FLAG_LAST ~= 0
    local atomic = opcode == COMPARE_SWAP or opcode == FETCH_ADD
    local write = opcode == WRITE or opcode == WRITE_IMM
    r:field(F.round, 1)
    local dst = r:field(F.dst_qp, 3)
    if r:field(F.zero, 1) ~= 0 then
        malformed("not 0 in front of the source QP")
    end
    local src = r:field(F.src_qp, 3)
    local sseq = r:field(F.stream_sequence, 4)
    local message = r:field(F.message, 4)
    if atomic or opcode == READ_REQUEST or opcode == READ_RESPONSE or opcode == ATOMIC_RESPONSE then
        r:field(F.request, 4)
    else
        r:field(F.receive_message, 4)
    end
    local offset = r:field(F.offset, 4)
    local total = r:field(F.total, 4)
    if write or atomic or opcode == READ_REQUEST then
        r:field(F.address, 8)
        r:field(F.key, 4)
    end
    if last and (opcode == WRITE_IMM or opcode == SEND_IMM) then
        r:field(F.immediate, 4)
    elseif last and opcode == SEND_INV then
        r:field(F.invalidate, 4)
    end
    if flags & FLAG_AFTER ~= 0 then
        if not write then
            malformed("'after' in what is no Write")
        end
        r:field(F.after, 4)
    end
    if atomic or opcode == READ_REQUEST then
        r:field(F.oldest, 4)
    end
    if opcode == COMPARE_SWAP then
        r:field(F.compare, 8)
        r:field(F.swap, 8)
    elseif opcode == FETCH_ADD then
        r:field(F.add, 8)
    elseif opcode == ATOMIC_RESPONSE then
        r:field(F.original, 8)
    end
    if total > MAX_MESSAGE then
        malformed("a message longer than 2^31 bytes")
    end
    if offset > total then
        malformed("an offset beyond the message")
    end
    text = string.format("%s QP 0x%06x to 0x%06x, %d, message %d at %d of %d", text, src, dst, sseq, message, offset, total)
    local function fits(len)
        if opcode == READ_REQUEST then
            return len == 0 and last and offset == 0
        elseif atomic or opcode == ATOMIC_RESPONSE then
            return len == 0 and last and offset == 0 and total == 8
        end
        local stop = offset + len
        return (stop == total) == last and stop <= total and (len ~= 0 or total == 0)
    end
    return text, fits, F.payload
end

bodies[ACK] = function(r)
    return ack_body(r)
end

bodies[PROBE] = function(r)
    local text, padding = probe_body(r)
    return string.format("%s, %d bytes of padding", text, padding), function(len)
        return len == padding
    end, F.probe_pad
end

bodies[PROBE_REPLY] = function(r)
    return probe_body(r) .. ", " .. ack_body(r)
end

bodies[QUERY] = function(r)
    local count = r:field(F.query_count, 1)
    local _, _, reserved = r:field(F.query_reserved, 3)
    if count > QUERIES_MAX then
        malformed("more than 40 queries")
    end
    if reserved:uint() ~= 0 then
        malformed("reserved bytes that are not 0")
    end
    for _ = 1, count do
        local branch, from = r:branch("Query")
        local direction = r:field(F.query_direction, 1, branch)
        if not DIRECTIONS[direction] then
            malformed("a direction that does not exist")
        end
        local dst = r:field(F.query_dst_qp, 3, branch)
        r:field(F.query_round, 1, branch)
        local src = r:field(F.query_src_qp, 3, branch)
        r:field(F.query_stream_sequence, 4, branch)
        branch:set_len(r.at - from)
        branch:append_text(string.format(": QP 0x%06x asks 0x%06x about %s", src, dst, DIRECTIONS[direction]))
    end
    return string.format("%d streams", count)
end

bodies[CLOSE] = function(r)
    local kind = r:field(F.close_kind, 4)
    if not CLOSES[kind] then
        malformed("a kind that does not exist")
    end
    r:field(F.close_number, 4)
    return CLOSES[kind]
end

-- Whether a GID names one host.
local function unicast(gid)
    if gid:sub(1, 10) == string.rep("\0", 10) and gid:sub(11, 12) == "\255\255" then
        local first = gid:byte(13)
        return first ~= 0 and first ~= 127 and first < 224
    end
    return gid:sub(1, 12) ~= string.rep("\0", 12) and gid:byte(1) ~= 255
end

bodies[PLANES] = function(r)
    local number = r:field(F.planes_number, 4)
    local known = r:field(F.planes_known, 4)
    r:field(F.epoch, 2)
    local count = r:field(F.planes_count, 1)
    if r:field(F.planes_zero, 1) ~= 0 then
        malformed("a byte that is not 0")
    end
    if count > PLANES_MAX then
        malformed("more than 8 planes")
    end
    if (number == 0) ~= (count == 0) then
        malformed("planes without a number, or a number without planes")
    end
    local least = 0
    for _ = 1, count do
        local branch, from = r:branch("Plane")
        local id = r:field(F.planes_id, 1, branch)
        local flags = r:field(F.planes_flags, 1, branch)
        if flags > 1 or r:field(F.planes_zero16, 2, branch) ~= 0 then
            malformed("bits that mean nothing in a plane")
        end
        local _, _, gid = r:field(F.planes_gid, 16, branch)
        if id < least or id >= PLANES_MAX then
            malformed("planes that are not in order")
        end
        if not unicast(gid:raw()) then
            malformed("an address that names no single host")
        end
        least = id + 1
        branch:set_len(r.at - from)
        branch:append_text(string.format(" %d%s", id, flags == 1 and ", draining" or ""))
    end
    return string.format("%d planes, number %d, %d is known", count, number, known)
end

bodies[INIT] = function(r)
    endpoints(r)
    local lowest = r:field(F.lowest, 1)
    local highest = r:field(F.highest, 1)
    local paths = r:field(F.paths, 1)
    local _, features, range = r:field(F.features, 4)
    features:add(F.features_crc, range)
    features:add(F.features_zero_checksum6, range)
    local payload = r:field(F.payload_mtu, 4)
    r:field(F.sender_connection, 8)
    r:field(F.peer_connection, 8)
    r:field(F.nonce, 8)
    r:field(F.instance, 8)
    r:field(F.cookie, 8)
    r:field(F.cookie_time, 4)
    r:field(F.timestamp, 4)
    r:field(F.epoch, 2)
    r:field(F.reserved, 14)
    if lowest > highest then
        malformed("a lowest version above the highest")
    end
    if paths == 0 or paths > PATHS_MAX then
        malformed("a number of paths that is not 1 to 64")
    end
    return string.format("%d paths, payload %d", paths, payload)
end
bodies[COOKIE] = bodies[INIT]
bodies[ACCEPT] = bodies[INIT]

bodies[REFUSE] = function(r)
    endpoints(r)
    local reason = r:field(F.reason, 1)
    if not REASONS[reason] then
        malformed("a reason that does not exist")
    end
    r:field(F.lowest, 1)
    r:field(F.highest, 1)
    r:field(F.nonce, 8)
    return REASONS[reason]
end

bodies[UNKNOWN] = function(r)
    endpoints(r)
    r:field(F.reserved, 3)
    r:field(F.unknown, 8)
    return ""
end

-- One packet.

-- Whether a base header begins at `at`.
local function plausible(tvb, at)
    if tvb:len() < at + BASE_LEN then
        return false
    end
    local kind = tvb(at, 1):uint()
    local len = tvb(at + 2, 2):uint()
    local type = kind & 0xf
    return kind >> 4 == 0 and TYPES[type] and (type == DATA or tvb(at + 1, 1):uint() == 0) and
        len > BASE_LEN and len <= HEADER_MAX and at + len <= tvb:reported_len() and
        (type < INIT or tvb(at + 8, 8):raw() == "\0\0\0\0\0\0\0\0")
end

local function crc_fits(tvb, at, len)
    local bytes = tvb:raw(at, len)
    return tvb(at + 4, 4):uint() == crc_of(bytes)
end

-- Length of the packet that begins at `at`. Usually all that is left. Datagrams that are cut
-- apart later hold several packets, all but the last of one length: the next one begins with
-- a header for the same connection, and the CRC of this one fits.
local function length_of(tvb, at)
    local left = tvb:reported_len() - at
    local first = tvb(at, 1):uint()
    if tvb:len() < tvb:reported_len() or not plausible(tvb, at) or first & 0xf >= INIT then
        return left
    end
    local header = tvb(at + 2, 2):uint()
    local bytes = tvb:raw(at, left)
    local connection = bytes:sub(9, 16)
    local crc, seen, done = nil, 0, nil
    local from = header + 1
    while true do
        local hit = bytes:find(connection, from + 8, true)
        if not hit then
            return left
        end
        local len = hit - 9
        if len >= header and plausible(tvb, at + len) then
            -- The sum goes on where the last candidate ended.
            if not crc then
                crc = crc_update(crc_update(crc_update(0xffffffff, bytes:sub(1, 4)), "\0\0\0\0"), bytes:sub(9, len))
            else
                crc = crc_update(crc, bytes:sub(done + 1, len))
            end
            done = len
            local field = tvb(at + 4, 4):uint()
            if field == crc ~ 0xffffffff or field == 0 then
                return len
            end
            seen = seen + 1
            if seen == 64 then
                return left
            end
        end
        from = hit - 7
    end
end

-- Frame in which a number of a path was seen first, by receiver, path, epoch and number.
local seen = {}
function metaroce.init()
    seen = {}
end

-- Dissects the packet of `len` bytes at `at`; what the list of packets shows.
local function packet(tvb, pinfo, root, at, len)
    local there = math.min(len, tvb:len() - at)
    local tree = root:add(metaroce, tvb(at, there))
    local stop = math.min(there, HEADER_MAX)
    local r = reader(tvb, at, at + stop, tree)
    local name, text, header, fits, shown = nil, nil, nil, nil, nil
    local kind

    local ok, why = pcall(function()
        local first = r:range(1)
        tree:add(F.version, first)
        tree:add(F.type, first)
        kind = first:uint() & 0xf
        name = TYPES[kind] or string.format("type %d", kind)
        local flags, item = r:field(F.flags, 1)
        if kind == DATA then
            local range = tvb(at + 1, 1)
            for _, f in ipairs({ F.flags_ack_request, F.flags_last, F.flags_solicited, F.flags_after }) do
                item:add(f, range)
            end
        end
        header = r:field(F.header_length, 2)
        r:field(F.crc, 4)
        local _, _, id = r:field(F.connection, 8)
        if first:uint() >> 4 ~= 0 then
            malformed("another version of the format")
        end
        if not TYPES[kind] then
            malformed("a type that does not exist")
        end
        if header > HEADER_MAX then
            malformed("a header longer than 512 bytes")
        end
        if header > len then
            malformed("a packet shorter than its header")
        end
        if header < BASE_LEN then
            malformed("a header length shorter than the base header")
        end
        if kind ~= DATA and flags ~= 0 then
            malformed("flags in what is no data")
        end
        if kind >= INIT and id:raw() ~= "\0\0\0\0\0\0\0\0" then
            malformed("a connection in a packet of the handshake")
        end
        r.stop = at + math.min(header, there)
        text, fits, shown = bodies[kind](r, flags)
        if r.at ~= at + header then
            malformed("a header length that the type does not have")
        end
        local payload = len - header
        local captured = math.min(payload, there - header)
        if captured > 0 then
            tree:add(shown or F.payload, tvb(at + header, captured))
        end
        if fits and not fits(payload) or not fits and payload ~= 0 then
            malformed("a payload that does not fit the header")
        end
    end)
    local cut = there < len
    if not ok then
        if why == Short and cut then
            tree:add_proto_expert_info(E.cut)
        elseif why == Short then
            tree:add_proto_expert_info(E.malformed, "Malformed packet: a header that ends too early")
        elseif getmetatable(why) == Malformed then
            tree:add_proto_expert_info(E.malformed, "Malformed packet: " .. why.text)
        else
            error(why, 0)
        end
    elseif cut then
        tree:add_proto_expert_info(E.cut)
    end

    if there >= BASE_LEN then
        local range = tvb(at + 4, 4)
        local status = CRC_UNCHECKED
        if not cut and metaroce.prefs.crc then
            if crc_fits(tvb, at, len) then
                status = CRC_GOOD
            elseif range:uint() == 0 and kind < INIT then
                status = CRC_ABSENT
            else
                status = CRC_BAD
            end
        end
        local item = tree:add(F.crc_status, range, status)
        item:set_generated()
        if status == CRC_BAD then
            item:add_proto_expert_info(E.crc)
        end
    end

    if ok and r.number then
        local path, epoch, sequence, item = table.unpack(r.number)
        local key = string.format("%s/%d/%d/%d", tvb(at + 8, 8):bytes():tohex(), path, epoch, sequence)
        local before = seen[key]
        if not before then
            seen[key] = pinfo.number
        elseif before < pinfo.number then
            item:add_proto_expert_info(E.resent, string.format("Sent before, in frame %d", before))
        end
    end
    text = text and text ~= "" and name .. ": " .. text or name or "malformed"
    tree:append_text(", " .. text)
    return text
end

function metaroce.dissector(tvb, pinfo, root)
    pinfo.cols.protocol = "MetaRoCE"
    local at, texts = 0, {}
    -- A datagram without a byte is a malformed packet, too.
    repeat
        local len = at < tvb:len() and length_of(tvb, at) or tvb:reported_len() - at
        texts[#texts + 1] = packet(tvb, pinfo, root, at, len)
        at = at + len
    until at >= tvb:reported_len() or at >= tvb:len()
    pinfo.cols.info = #texts == 1 and texts[1] or string.format("[%d packets] %s", #texts, texts[1])
    return tvb:len()
end

-- On other ports: what has the form of a packet and, when all of it was captured, its CRC.
local function heuristic(tvb, pinfo, root)
    if not metaroce.prefs.heuristic or not plausible(tvb, 0) then
        return false
    end
    if tvb:len() == tvb:reported_len() then
        local len = length_of(tvb, 0)
        if not crc_fits(tvb, 0, len) then
            return false
        end
    end
    metaroce.dissector(tvb, pinfo, root)
    return true
end

local udp = DissectorTable.get("udp.port")
local port = metaroce.prefs.port
udp:add(port, metaroce)
function metaroce.prefs_changed()
    if port ~= metaroce.prefs.port then
        udp:remove(port, metaroce)
        port = metaroce.prefs.port
        udp:add(port, metaroce)
    end
end
metaroce:register_heuristic("udp", heuristic)
