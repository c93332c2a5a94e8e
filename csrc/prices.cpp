// Nanoseconds and bytes of a pass: the twin of planning/cost.py and planning/demand.py.
#include <algorithm>

#include "pricing.h"

namespace augtree {

namespace {

i64 padding(i64 pairs, i64 rows, i64 floor) {
    return rows > 0 && rows < floor ? pairs * (floor - rows) / rows : 0;
}

i64 exposed(i64 wire, i64 tiles, i64 first, i64 stages) {
    if (!stages) return 0;
    if (stages == 1) return std::max<i64>(0, wire - first);
    // All is hidden, and nothing has to be divided, where every piece takes less than what runs beside it.
    if (wire <= tiles - first && static_cast<i128>(first + 1) * stages > wire) return 0;
    const i64 piece = wire / stages, later = (tiles - first) / stages;
    return std::max<i64>(0, piece - first) + (stages - 1) * std::max<i64>(0, piece - later);
}

// Bytes that a rank sends (out) or receives, of what crosses nodes or of everything.
i64 bytes(const Constants& c, const RankLoad& x, bool out, bool backward, bool keep, bool far) {
    const i64 kv_out = far ? x.kv_far_out : x.kv_out, kv_in = far ? x.kv_far_in : x.kv_in;
    const i64 q_out = far ? x.q_far_out : x.q_out, q_in = far ? x.q_far_in : x.q_in;
    const i64 kv = out ? kv_out : kv_in, grad = out ? kv_in : kv_out;
    const i64 q = out ? q_out : q_in, back = out ? q_in : q_out;
    if (!(q | back)) return backward ? grad * c.kv_grad + (keep ? 0 : kv * c.kv) : kv * c.kv;
    if (!backward) return kv * c.kv + q * c.query + back * c.result;
    const i64 total = grad * c.kv_grad + q * c.result_grad + back * c.query_grad;
    return keep ? total : total + kv * c.kv + q * c.query;
}

i64 rows_ns(const Constants& c, i64 rows) {
    return c.linear.ns(rows + std::min<i64>(rows, 1) * c.half_rows) + c.beside.ns(rows);
}

// What a rank computes in a layer, forward; the backward's is a share of it.
struct Work {
    i64 linear, tiles, early, merge;
};

Work work_of(const Constants& c, const RankLoad& x) {
    const i64 own = std::max<i64>(x.pairs - x.visiting - x.triangle, 0);
    const i64 above = std::min(own, x.above), half = (x.cut_rows + x.lane_cut_rows) / 2;
    const i64 masked = x.diagonal + padding(above, x.below, c.query_rows) +
                       padding(own - above, half, c.query_rows) + padding(x.visiting, x.q_in, c.query_rows);
    return {rows_ns(c, x.rows), c.attention.ns(x.pairs + masked) + x.tiles * c.tile_ns, c.attention.ns(x.early),
            c.merging.ns(x.merged)};
}

// What a rank's traffic takes: the slower way of what stays on its node, then of what crosses to others.
i64 wire_ns(const Constants& c, const RankLoad& x, bool backward, bool keep) {
    if (!(x.kv_in | x.kv_out | x.q_in | x.q_out)) return x.messages * c.message_ns;
    if (!(x.q_in | x.q_out) && x.kv_in == x.kv_out && x.kv_far_in == x.kv_far_out) {  // as much either way
        const i64 row = backward ? c.kv_grad + (keep ? 0 : c.kv) : c.kv;
        return c.link.ns((x.kv_in - x.kv_far_in) * row) + c.nic.ns(x.kv_far_in * row) + x.messages * c.message_ns;
    }
    i64 near = 0, far = 0;
    const bool crosses = x.kv_far_in | x.kv_far_out | x.q_far_in | x.q_far_out;
    for (bool out : {true, false}) {
        const i64 across = crosses ? bytes(c, x, out, backward, keep, true) : 0;
        near = std::max(near, bytes(c, x, out, backward, keep, false) - across);
        far = std::max(far, across);
    }
    return c.link.ns(near) + c.nic.ns(far) + x.messages * c.message_ns;
}

// (one layer of one rank, traffic that nothing hides)
std::pair<i64, i64> layer_ns(
    const Constants& c, const RankLoad& x, const Work& of, const PassSpec& p, i64 stages, bool backward) {
    const i64 linear = backward ? of.linear * c.gemm_pct / 100 : of.linear;
    const i64 tiles = backward ? of.tiles * c.attention_pct / 100 : of.tiles;
    const i64 wire = wire_ns(c, x, backward, p.keep);
    i64 shown = wire;
    if (c.overlap && p.prefetch && !backward) {
        shown = std::max<i64>(0, wire - linear - tiles);
    } else if (c.overlap) {
        const i64 first = backward ? of.early * c.attention_pct / 100 : of.early;
        shown = exposed(wire, tiles, std::min(first, tiles), stages);
    }
    const i64 fixed = stages * c.stage_ns + c.layer_ns * (backward ? 2 : 1);
    return {linear + tiles + of.merge + shown + fixed, shown};
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

// `fit` in closed form, where a whole layer less always gains as much, or never does; `left`: bytes beside what is
// fixed, enough for `most` whole layers, not for all.
std::optional<Pair> Demand::fit_evenly(i64 most, i64 left) const {
    if (saved_attention < 0 || saved < saved_attention) return std::nullopt;
    const i64 quotient = whole / attention, spare = left - layers * attention;
    const auto pair = [&](i64 n) { return Pair{n, std::min(layers - n, (left - n * whole) / attention)}; };
    const auto gained = [&](Pair p) { return p.whole * saved + p.attention * saved_attention; };
    // It leaves room for attention of `quotient` others, or of one more: no gain;
    if (saved_attention * (quotient + 1) <= saved) return pair(most);
    // or a gain, until attention of all others fits.
    if (saved_attention * quotient <= saved) return std::nullopt;
    if (spare < 0) return pair(0);
    const i64 all = spare / (whole - attention);
    if (all >= most) return pair(most);
    const Pair more = pair(all + 1), fewer = pair(all);
    return gained(fewer) > gained(more) ? fewer : more;
}

// Every number of whole layers in turn, from all on. The layers with attention that still fit change by the same
// quotient each time, and a carry. It ends where even attention of all other layers would gain no more.
std::optional<Pair> Demand::fit(i64 room) const {
    if (room >= peak({layers, 0}) && saved >= saved_attention) return Pair{layers, 0};
    std::optional<Pair> best;
    i64 gain = -1, most = 0, rest = 0;
    const bool steady = attention > 0 && whole >= 0;
    const i64 quotient = steady ? whole / attention : 0, remainder = steady ? whole % attention : 0;
    bool counted = false;
    i64 first = layers;
    if (whole > 0 && peak({layers, 0}) > room) {  // more whole layers than these do not fit
        const i64 left = room - fixed - work_again;
        if (left < 0) return std::nullopt;
        first = std::min(layers - 1, left / whole);
        if (const auto found = steady ? fit_evenly(first, left) : std::nullopt) return found;
    }
    for (i64 n = first; n >= 0; --n) {
        if (saved >= saved_attention && gain >= n * saved + (layers - n) * saved_attention) break;
        const i64 left = room - peak({n, 0});
        if (left < 0) continue;
        if (!steady || !counted) {
            most = attention ? left / attention : layers;
            rest = attention ? left % attention : 0;
            counted = n < layers;  // with all of them whole, less memory to work is needed
        } else {
            most += quotient;
            rest += remainder;
            if (rest >= attention) {
                most += 1;
                rest -= attention;
            }
        }
        const i64 kept = std::min(layers - n, most), gained = n * saved + kept * saved_attention;
        if (gained > gain) {
            best = Pair{n, kept};
            gain = gained;
        }
    }
    return best;
}

void Copied::add(const Copied& o) {
    forward += o.forward, backward += o.backward, saved += o.saved, saved_attention += o.saved_attention;
    fixed += o.fixed, whole += o.whole, attention += o.attention;
}

Pair Copied::best() const {
    const auto spared = [](i64 ns) { return ns + ns / kHostSpare; };
    const i64 fixed = spared(this->fixed), whole = spared(this->whole), attention = spared(this->attention);
    Pair best{layers, 0};
    i64 least = INT64_MAX;
    for (i64 n = layers; n >= 0; --n) {
        const i64 rest = layers - n, copies = fixed + n * whole, back = backward - n * saved;
        // Fewer copies than these, and more that is saved, there are not.
        if (std::max(forward, copies) + std::max(back - rest * saved_attention, copies) >= least) continue;
        const auto look = [&](i64 kept) {
            const i64 moved = copies + kept * attention;
            const i64 time = std::max(forward, moved) + std::max(back - kept * saved_attention, moved);
            if (time < least) {
                best = Pair{n, kept};
                least = time;
            }
        };
        look(0);
        look(rest);
        // Where the copies outgrow the forward, or the backward; a place beyond either end is that end.
        for (const auto& [hidden, each] :
             {std::pair(forward - copies, attention), std::pair(back - copies, attention + saved_attention)}) {
            const i64 step = std::max<i64>(each, 1);
            if (0 < hidden && hidden < rest * step) look(hidden / step);
        }
    }
    return best;
}

PassPrice::PassPrice(
    const Constants& c, const RankLoad* ranks, std::size_t count, i64 stages, const PassSpec& p,
    bool provides, Memory* memory)
    : lines(count, memory), c_(&c), offloads_(p.offload && c.has_host) {
    for (Line& line : lines) {
        const RankLoad& x = *ranks++;
        const Work of = work_of(c, x);
        const auto once = layer_ns(c, x, of, p, stages, false), back = layer_ns(c, x, of, p, stages, true);
        line.forward = line.again = once.first;
        line.backward = back.first;
        line.exposed = once.second + back.second;
        line.again_rest = of.linear + c.layer_ns;
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
    }
}

i64 PassPrice::peak(Pair pair) const {
    i64 peak = 0;
    for (const Line& x : lines) peak = std::max(peak, kept(x, pair) + work(x, pair));
    return peak;
}

i64 PassPrice::least_time(bool vocabulary) const {
    const i64 layers = c_->stage_layers;
    i64 forward = 0, backward = 0;
    for (const Line& x : lines) {
        forward = std::max(forward, layers * x.forward + (vocabulary ? x.vocabulary : 0));
        backward = std::max(backward, layers * x.backward + (vocabulary ? x.vocabulary_back : 0));
    }
    return forward + backward + 2 * c_->pass_ns;
}

i64 PassPrice::shown() const {
    i64 shown = 0;
    for (const Line& x : lines) shown = std::max(shown, x.exposed);
    return c_->stage_layers * shown;
}

i64 PassPrice::slot(Pair pair) const {
    const auto [forward, backward] = time(pair, false);
    return forward + backward;
}

std::pair<i64, i64> PassPrice::time(Pair pair, bool vocabulary) const {
    const i64 stages = c_->stages;
    const auto share = [&](i64 n) { return stages == 1 ? n : (n + stages - 1) / stages; };
    const i64 layers = c_->stage_layers, repeated = share(c_->layers - pair.whole);
    const i64 attention = std::min(stages == 1 ? pair.attention : pair.attention / stages, repeated);
    const i64 again = repeated - attention;
    i64 forward = 0, backward = 0, rested = 0;
    for (const Line& x : lines) {
        forward = std::max(forward, layers * x.forward + (vocabulary ? x.vocabulary : 0));
        backward = std::max(
            backward, layers * x.backward + (vocabulary ? x.vocabulary_back : 0) + again * x.again + attention * x.again_rest);
        rested = std::max(rested, resting(x, pair));
    }
    if (offloads_) {
        const i64 moved = c_->host.ns(rested);
        forward = std::max(forward, moved);
        backward = std::max(backward, moved);
    }
    return {forward + c_->pass_ns, backward + c_->pass_ns};
}

Copied PassPrice::copied() const {
    const i64 stages = c_->stages, layers = c_->stage_layers;
    Copied d{c_->layers};
    i64 fixed = 0, whole = 0, attention = 0, saved = 0, saved_attention = 0;
    for (const Line& x : lines) {
        d.forward = std::max(d.forward, layers * x.forward + x.vocabulary);
        d.backward = std::max(d.backward, layers * (x.backward + x.again) + x.vocabulary_back);
        saved = std::max(saved, x.again);
        saved_attention = std::max(saved_attention, x.again - x.again_rest);
        fixed = std::max(fixed, x.fixed);
        whole = std::max(whole, x.whole);
        attention = std::max(attention, x.attention);
    }
    d.saved = saved / stages;
    d.saved_attention = saved_attention / stages;
    d.fixed = c_->host.ns(fixed);
    d.whole = c_->host.ns(whole);
    d.attention = c_->host.ns(attention);
    return d;
}

Demand PassPrice::demand() const {
    const i64 least = INT64_MIN;
    Demand d{c_->layers, least, least, least, least, least, least, least};
    for (const Line& x : lines) {
        d.fixed = std::max(d.fixed, offloads_ ? x.state : x.state + x.fixed);
        d.whole = std::max(d.whole, offloads_ ? 0 : x.whole - x.state_whole);
        d.attention = std::max(d.attention, offloads_ ? 0 : x.attention);
        d.work = std::max(d.work, x.work);
        d.work_again = std::max(d.work_again, x.work_again);
        d.saved = std::max(d.saved, x.again);
        d.saved_attention = std::max(d.saved_attention, x.again - x.again_rest);
    }
    return d;
}

}  // namespace augtree
