/* All-reduces on slow, lossy links in virtual time, as CSV: benchmarks/micro/slow_links.py looks
 * for those that take many times what the links need. FIRST COUNT are seeds; name=value sets a
 * field. */
#include "slow_links.h"

#include <stdio.h>

static const char *const deliveries[] = {"lossy", "repair", "reliable"};

static int set(slow_scenario *s, const char *text) {
    const struct {
        const char *name;
        double *field;
    } fields[] = {{"hosts", &s->hosts},           {"mbit", &s->mbit},   {"rtt_ms", &s->rtt_ms},
                  {"queue_ms", &s->queue_ms},     {"loss", &s->loss},   {"burst", &s->burst},
                  {"capacity", &s->capacity},     {"bytes", &s->bytes}, {"ops", &s->ops},
                  {"paces_port", &s->paces_port}, {"deep", &s->deep},   {"pause_ms", &s->pause_ms},
                  {"delivery", &s->delivery}};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        size_t n = strlen(fields[i].name);
        if (strncmp(text, fields[i].name, n) == 0 && text[n] == '=') {
            *fields[i].field = atof(text + n + 1);
            return 1;
        }
    }
    return 0;
}

/* The scenario, the limit in seconds, shares lost and dropped, how many failed, and the time of
 * each operation against the limit. */
static void print(const slow_run *r) {
    const slow_scenario *s = &r->s;
    const memory_counts *counts = &r->ops[r->ended - 1].counts;
    double sent = (double)counts->sent;
    int failed = 0;
    for (uint32_t k = 0; k < r->ended; k++)
        failed += r->ops[k].code != LC_OK;
    printf("%llu,%g,%.3f,%g,%g,%.4f,%g,%g,%.0f,%g,%.0f,%s,%.4f,%.5f,%.5f,%d,",
           (unsigned long long)s->seed, s->hosts, s->mbit, s->rtt_ms, s->queue_ms, s->loss,
           s->burst, s->capacity, s->bytes, s->deep, s->pause_ms, deliveries[(int)s->delivery],
           slow_limit_s(s), (double)counts->lost / sent, (double)counts->dropped / sent, failed);
    for (uint32_t k = 0; k < r->ended; k++)
        printf(k ? " %.3f" : "%.3f", slow_seconds(r, k) / slow_limit_s(s));
    printf("\n");
}

int main(int n, char **arguments) {
    uint64_t first = n > 1 ? strtoull(arguments[1], NULL, 10) : 1;
    uint64_t count = n > 2 ? strtoull(arguments[2], NULL, 10) : 1;
    for (uint64_t seed = first; seed < first + count; seed++) {
        slow_scenario s = slow_drawn(seed);
        for (int i = 3; i < n; i++)
            if (!set(&s, arguments[i]))
                return 1;
        slow_run *r = slow_run_all(&s);
        print(r);
        free(r);
    }
    return 0;
}
