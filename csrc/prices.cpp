// Nanoseconds and bytes of a pass: the twin of planning/cost.py.
#include <algorithm>

#include "pricing.h"

namespace augtree {

namespace {

i64 padding(i64 pairs, i64 rows, i64 floor) {
    return rows > 0 && rows < floor ? pairs * (floor - rows) / rows : 0;
}

i64 exposed(i64 wire, i64 tiles, i64 first, i64 stages) {
    if (!stages) return 0;
    const i64 piece = wire / stages, later = (tiles - first) / stages;
    return std::max<i64>(0, piece - first) + (stages - 1) * std::max<i64>(0, piece - later);
}

// Bytes that a rank sends (out) or receives, of what crosses nodes or of everything.
i64 bytes(const Constants& c, const RankLoad& x, bool out, bool backward, bool keep, bool far) {
    const i64 kv_out = far ? x.kv_far_out : x.kv_out, kv_in = far ? x.kv_far_in : x.kv_in;
    const i64 q_out = far ? x.q_far_out : x.q_out, q_in = far ? x.q_far_in : x.q_in;
    const i64 kv = out ? kv_out : kv_in, grad = out ? kv_in : kv_out;
    const i64 q = out ? q_out : q_in, back = out ? q_in : q_out;
    if (!backward) return kv * c.kv + q * c.query + back * c.result;
    const i64 total = grad * c.kv_grad + q * c.result_grad + back * c.query_grad;
    return keep ? total : total + kv * c.kv + q * c.query;
}

i64 rows_ns(const Constants& c, i64 rows) {
    return c.linear.ns(rows + std::min<i64>(rows, 1) * c.half_rows) + c.beside.ns(rows);
}

// (one layer of one rank, traffic that nothing hides)
std::pair<i64, i64> layer_ns(const Constants& c, const RankLoad& x, const PassSpec& p, i64 stages, bool backward) {
    const i64 gemm = backward ? c.gemm_pct : 100, attention = backward ? c.attention_pct : 100;
    const i64 linear = rows_ns(c, x.rows) * gemm / 100;
    const i64 own = std::max<i64>(x.pairs - x.visiting - x.triangle, 0);
    const i64 masked =
        x.diagonal + padding(own, x.rows, c.query_rows) + padding(x.visiting, x.q_in, c.query_rows);
    const i64 tiles = (c.attention.ns(x.pairs + masked) + x.tiles * c.tile_ns) * attention / 100;
    const i64 merge = c.merging.ns(x.merged);
    i64 near = 0, far = 0;
    for (bool out : {true, false}) {
        const i64 across = bytes(c, x, out, backward, p.keep, true);
        near = std::max(near, bytes(c, x, out, backward, p.keep, false) - across);
        far = std::max(far, across);
    }
    const i64 wire = c.link.ns(near) + c.nic.ns(far) + x.messages * c.message_ns;
    i64 shown = wire;
    if (c.overlap && p.prefetch && !backward) {
        shown = std::max<i64>(0, wire - linear - tiles);
    } else if (c.overlap) {
        const i64 first = c.attention.ns(x.early) * attention / 100;
        shown = exposed(wire, tiles, std::min(first, tiles), stages);
    }
    const i64 fixed = stages * c.stage_ns + c.layer_ns * (backward ? 2 : 1);
    return {linear + tiles + merge + shown + fixed, shown};
}

}  // namespace

Demand Demand::together(const Demand& o) const {
    return {layers, fixed + o.fixed, whole + o.whole, attention + o.attention, std::max(work, o.work),
            std::max(work_again, o.work_again), saved + o.saved, saved_attention + o.saved_attention};
}

Demand Demand::in_turn(const Demand& o) const {
    return {std::max(layers, o.layers), std::max(fixed, o.fixed), std::max(whole, o.whole),
            std::max(attention, o.attention), std::max(work, o.work), std::max(work_again, o.work_again),
            std::max(saved, o.saved), std::max(saved_attention, o.saved_attention)};
}

Demand Demand::beside(i64 bytes) const {
    Demand d = *this;
    d.work = std::max(work, bytes);
    d.work_again = std::max(work_again, bytes);
    return d;
}

std::optional<Pair> Demand::fit(i64 room) const {
    std::optional<Pair> best;
    i64 gain = -1;
    for (i64 n = layers; n >= 0; --n) {
        const i64 left = room - peak({n, 0});
        if (left < 0) continue;
        const i64 rest = layers - n, kept = attention ? std::min(rest, left / attention) : rest;
        const i64 gained = n * saved + kept * saved_attention;
        if (gained > gain) {
            best = Pair{n, kept};
            gain = gained;
        }
    }
    return best;
}

PassPrice::PassPrice(const Constants& c, const Loads& loads, const PassSpec& p, bool provides)
    : c_(c), offloads_(p.offload && c.has_host) {
    for (const RankLoad& x : loads.ranks) {
        Line line{};
        const auto once = layer_ns(c, x, p, loads.stages, false), back = layer_ns(c, x, p, loads.stages, true);
        line.forward = line.again = once.first;
        line.backward = back.first;
        line.exposed = once.second + back.second;
        line.again_rest = rows_ns(c, x.rows) + c.layer_ns;
        const bool chunked = 0 < c.logit_rows && c.logit_rows < x.scored;
        line.vocabulary = c.vocabulary.ns(x.scored + std::min<i64>(x.scored, 1) * c.half_rows);
        line.vocabulary_back = line.vocabulary * (chunked ? 3 : 2);
        const i64 logits = x.scored * c.logit, quarter = x.rows * c.saved / 4;
        const i64 received = p.keep ? x.kv_in * c.kv + x.q_in * c.query : 0;
        const i64 wire = (x.kv_in + x.kv_out) * c.kv_grad + (p.prefetch ? x.kv_in * c.kv : 0);
        const i64 chunk = chunked ? 3 * c.logit_rows * c.logit : logits;
        line.fixed = c.layers * x.rows * c.input + (chunked ? x.scored * c.hidden : 2 * logits);
        line.whole = x.rows * (c.saved - c.input) + received;
        line.attention = x.rows * c.attended + received;
        line.state = provides ? c.layers * (x.rows * c.kv_grad + x.rows * c.kv) : 0;
        line.state_whole = provides && !p.offload ? x.rows * c.kv : 0;
        line.work = 9 * quarter + wire + chunk;
        line.work_again = 13 * quarter + wire + chunk;
        lines.push_back(line);
    }
}

i64 PassPrice::resting(const Line& x, Pair pair) const {
    return x.fixed + pair.whole * x.whole + pair.attention * x.attention;
}

i64 PassPrice::kept(const Line& x, Pair pair) const {
    return (offloads_ ? 0 : resting(x, pair)) + x.state - pair.whole * x.state_whole;
}

i64 PassPrice::peak(Pair pair) const {
    i64 peak = 0;
    for (const Line& x : lines) peak = std::max(peak, kept(x, pair) + work(x, pair));
    return peak;
}

bool PassPrice::hidden() const {
    return std::none_of(lines.begin(), lines.end(), [](const Line& x) { return x.exposed; });
}

std::pair<i64, i64> PassPrice::time(Pair pair) const {
    const auto share = [&](i64 n) { return (n + c_.stages - 1) / c_.stages; };
    const i64 layers = share(c_.layers), repeated = share(c_.layers - pair.whole);
    const i64 attention = std::min(pair.attention / c_.stages, repeated), again = repeated - attention;
    i64 forward = 0, backward = 0, rested = 0;
    for (const Line& x : lines) {
        forward = std::max(forward, layers * x.forward + x.vocabulary);
        backward = std::max(
            backward, layers * x.backward + x.vocabulary_back + again * x.again + attention * x.again_rest);
        rested = std::max(rested, resting(x, pair));
    }
    if (offloads_) {
        const i64 moved = c_.host.ns(rested);
        forward = std::max(forward, moved);
        backward = std::max(backward, moved);
    }
    return {forward + c_.pass_ns, backward + c_.pass_ns};
}

Demand PassPrice::demand() const {
    const i64 least = INT64_MIN;
    Demand d{c_.layers, least, least, least, least, least, least, least};
    for (const Line& x : lines) {
        d = d.in_turn({c_.layers, offloads_ ? x.state : x.state + x.fixed, offloads_ ? 0 : x.whole - x.state_whole,
                       offloads_ ? 0 : x.attention, x.work, x.work_again, x.again, x.again - x.again_rest});
    }
    return d;
}

}  // namespace augtree
