/* When a stream is given up: by how long it has been silent, and by what excuses that. A table of
 * what is known of one stream, with the time until which it is waited for. */
#include "check.h"
#include "state.h"
#include "stream_in.h"

enum { PACKETS = 100, SLOT = 3, ORDER = 7, PEER = 1, SAMPLES = 8 };

static const uint64_t MS = 1000000;

/* Milliseconds, times since the operation was started. What is learnt makes the deadline of a
 * stream 4 * (100 * 5 + 10) = 2,040 ms from its first packet on, and lets it be silent for 4 * 10
 * ms then, or for 4 gaps or round trips of its own if those are longer. */
enum { BEGUN = 100000, LONGEST = 5000, LEAST = 1000, PER_PACKET = 5, GAP = 10 };
enum { NEVER = 1000000 };
enum { LOSSY, NEEDED, RELIABLE };
enum { UNKNOWN, LEARNT, QUICK }; /* how long streams of the peer take */
enum { NONE, OLDER, SIBLING, YOUNGER };

typedef struct {
    const char *what;
    uint32_t until; /* the last moment at which it is waited for */
    int kind, known;
    uint32_t started, last, gap, fin; /* the stream; 0: not yet */
    uint32_t excused;                 /* the peer said that it waits itself */
    uint32_t awake;                   /* this process came back from being stopped */
    uint32_t heard;                   /* the peer, for the last time; 0: all along */
    uint32_t deaf;                    /* since then it hears nothing, as it says; 0: it does */
    uint32_t back, rtt;               /* the path */
    uint32_t data;                    /* a packet of another stream came, */
    int of;                           /* of such an operation */
    int silence;                      /* as told once the stream is given up */
} stream;

enum { SILENT = LC_SILENT_FROM, DEAF = LC_SILENT_TO };

#define ROW(name, ms, ...) {.what = (name), .until = (ms), __VA_ARGS__}

static const stream STREAMS[] = {
    ROW("what is reliable is resent", NEVER, .kind = RELIABLE, .started = 10, .last = 20,
        .heard = 20),
    ROW("it may stand in its sender's queue", NEVER, .kind = LOSSY),
    ROW("so may what is needed", NEVER, .kind = NEEDED),
    ROW("rounds end without packets", NEVER, .fin = 50),
    ROW("nothing comes from the peer", 5500, .heard = 500, .silence = SILENT),
    ROW("nothing comes, and the peer waited", 8000, .excused = 3000, .heard = 500,
        .silence = SILENT),
    ROW("nothing comes, this process stopped", 8000, .awake = 3000, .heard = 500,
        .silence = SILENT),
    ROW("packets of an older operation came", 8000, .heard = 500, .data = 3000, .of = OLDER,
        .silence = SILENT),
    ROW("packets of this operation came", 8000, .heard = 500, .data = 3000, .of = SIBLING,
        .silence = SILENT),
    ROW("younger operations are no excuse", 5500, .heard = 500, .data = 3000, .of = YOUNGER,
        .silence = SILENT),
    ROW("who hears nothing sends only what goes ahead", 5500, .deaf = 500, .data = 5400,
        .of = SIBLING, .silence = DEAF),
    ROW("needed, since the call began", 5000, .kind = NEEDED, .fin = 50),
    ROW("needed, since a packet came", 8000, .kind = NEEDED, .started = 10, .last = 3000,
        .fin = 50),
    ROW("needed, and the peer waited", 8000, .kind = NEEDED, .fin = 50, .excused = 3000),
    ROW("needed, and this process stopped", 8000, .kind = NEEDED, .fin = 50, .awake = 3000),
    ROW("needed, behind another stream", 8000, .kind = NEEDED, .fin = 50, .data = 3000,
        .of = SIBLING),
    ROW("needed, whatever is learnt", 6500, .kind = NEEDED, .known = LEARNT, .started = 10,
        .last = 1500),
    ROW("the longest that is waited", 6000, .started = 10, .last = 1000),
    ROW("longest, and the peer waited", 8000, .started = 10, .last = 1000, .excused = 3000),
    ROW("longest, and this process stopped", 8000, .started = 10, .last = 1000, .awake = 3000),
    ROW("longest, behind another stream", 8000, .started = 10, .last = 1000, .data = 3000,
        .of = SIBLING),
    ROW("longest, and its path is why", 6000, .started = 10, .last = 1000, .heard = 1500,
        .silence = SILENT),
    ROW("longest, and its path isn't why", 6000, .started = 10, .last = 1000, .heard = 4000),
    ROW("learnt", 2140, .known = LEARNT, .started = 100, .last = 2000, .gap = GAP),
    ROW("the least that is waited", 1100, .known = QUICK, .started = 100, .last = 200),
    ROW("learnt, and packets keep coming", 3040, .known = LEARNT, .started = 100, .last = 3000),
    ROW("learnt, and they are far apart", 3800, .known = LEARNT, .started = 100, .last = 3000,
        .gap = 200),
    ROW("learnt, and the path is long", 3800, .known = LEARNT, .started = 100, .last = 3000,
        .rtt = 200),
    ROW("learnt, and its path came back", 4540, .known = LEARNT, .started = 100, .last = 2000,
        .back = 2500),
    ROW("learnt, and the peer waited", 4540, .known = LEARNT, .started = 100, .last = 2000,
        .excused = 2500),
    ROW("learnt, and this process stopped", 4540, .known = LEARNT, .started = 100, .last = 2000,
        .awake = 2500),
    ROW("far apart, and the peer waited", 5200, .known = LEARNT, .started = 100, .last = 900,
        .gap = 800, .excused = 2000),
    ROW("far apart, after the peer waited", 6200, .known = LEARNT, .started = 100, .last = 3000,
        .gap = 800, .excused = 2000),
    ROW("learnt, and its path is away", 7000, .known = LEARNT, .started = 1000, .last = 2000,
        .heard = 2000, .silence = SILENT),
};

/* What lc_overdue looks at. */
typedef struct {
    lc_host host;
    lc_group group;
    lc_member members[2];
    lc_path path;
    lc_op op;
    lc_op_slot slot;
    lc_level level;
    lc_in in;
    uint64_t arrived[2], needed[2];
} stage;

static uint64_t at(uint32_t ms) {
    return ms ? (BEGUN + (uint64_t)ms) * MS : 0;
}

static void learn(stage *s, const stream *is) {
    int quick = is->known == QUICK;
    uint64_t took = quick ? MS : PER_PACKET * PACKETS * MS;
    for (int i = 0; i < SAMPLES && is->known; i++)
        lc_deadline_add(&s->path.deadline, took, quick ? 0 : GAP * MS, PACKETS);
}

static void set(stage *s, const stream *is) {
    memset(s, 0, sizeof *s);
    s->group.host = &s->host;
    s->group.config = (lc_group_config){
        .size = 2, .deadline_min_ns = LEAST * MS, .deadline_max_ns = LONGEST * MS};
    s->group.members = s->members;
    s->members[PEER].path = &s->path;
    s->op.group = &s->group;
    s->op.order = ORDER;
    s->op.started_ns = BEGUN * MS;
    s->slot.op = &s->op;
    s->slot.level = &s->level;
    s->slot.desc.number = SLOT;
    s->slot.n_packets = PACKETS;
    s->level.reliable = is->kind == RELIABLE;
    s->needed[0] = 1;
    s->in = (lc_in){.slot = &s->slot,
                    .peer = PEER,
                    .arrived = s->arrived,
                    .needed = is->kind == NEEDED ? s->needed : NULL,
                    .started_ns = at(is->started),
                    .last_ns = at(is->last),
                    .gap_ns = is->gap * MS,
                    .fin_ns = at(is->fin),
                    .excused_ns = at(is->excused)};
    s->path.back_ns = at(is->back);
    s->path.data_ns = at(is->of ? is->data : is->last);
    s->path.data_order = (uint64_t)(ORDER + (is->of == YOUNGER) - (is->of == OLDER));
    s->path.data_slot = is->of ? SLOT + 1 : SLOT;
    s->path.pace.measure.rtt_ns = is->rtt * MS;
    s->host.awake_ns = at(is->awake);
    s->path.unreached = is->deaf ? PACKETS : 0;
    s->path.unreached_ns = at(is->deaf);
    learn(s, is);
}

static int is_overdue(stage *s, const stream *is, uint64_t now) {
    set(s, is);
    s->host.now = now;
    s->path.heard_ns = s->members[PEER].heard_ns = is->heard ? at(is->heard) : now;
    s->path.unreached_told_ns = now;
    return lc_overdue(&s->in);
}

int main(void) {
    static stage s;
    for (size_t i = 0; i < sizeof STREAMS / sizeof *STREAMS; i++) {
        const stream *is = &STREAMS[i];
        CHECK_AT(!is_overdue(&s, is, at(is->until)), "%s: given up too soon", is->what);
        int over = is_overdue(&s, is, at(is->until) + 1);
        CHECK_AT(over == (is->until != NEVER), "%s: given up %d", is->what, over);
        CHECK_AT(s.members[PEER].silence == is->silence, "%s: silence %d", is->what,
                 s.members[PEER].silence);
    }
    return check_result("test_overdue");
}
