/* Opening libibverbs. */
#define _GNU_SOURCE
#include "verbs_api.h"

#include <dlfcn.h>
#include <limits.h>
#include <string.h>

enum { LIBRARIES = 4 }; /* the system's, and those that tests have */

static const char DEFAULT[] = "libibverbs.so.1";

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    char path[PATH_MAX];
    vb_api api;
} found[LIBRARIES];
static int n_found;

/* A library may have a function in several versions, of which some take other structures. musl
 * knows the newest alone. */
static void *symbol(void *library, const char *name) {
#ifdef __GLIBC__
    void *at = dlvsym(library, name, "IBVERBS_1.1");
    if (at)
        return at;
#endif
    return dlsym(library, name);
}

#define SYMBOL(name) {"ibv_" #name, offsetof(vb_api, name)}

static int load(void *library, vb_api *api) {
    static const struct {
        const char *name;
        size_t at;
    } symbols[] = {
        SYMBOL(get_device_list), SYMBOL(free_device_list), SYMBOL(get_device_name),
        SYMBOL(open_device),     SYMBOL(close_device),     SYMBOL(query_port),
        SYMBOL(query_gid),       SYMBOL(query_pkey),       SYMBOL(alloc_pd),
        SYMBOL(dealloc_pd),      SYMBOL(reg_mr),           SYMBOL(dereg_mr),
        SYMBOL(create_cq),       SYMBOL(destroy_cq),       SYMBOL(create_comp_channel),
        SYMBOL(get_cq_event),    SYMBOL(ack_cq_events),    SYMBOL(destroy_comp_channel),
        SYMBOL(create_qp),       SYMBOL(modify_qp),        SYMBOL(destroy_qp),
        SYMBOL(create_ah),       SYMBOL(destroy_ah),       SYMBOL(get_async_event),
        SYMBOL(ack_async_event),
    };
    _Static_assert(sizeof symbols / sizeof *symbols * sizeof(void *) == sizeof *api,
                   "each function has its name");
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        void *at = symbol(library, symbols[i].name);
        if (!at)
            return 0;
        memcpy((char *)api + symbols[i].at, &at, sizeof at);
    }
    return 1;
}

static const vb_api *open_library(const char *path) {
    if (n_found == LIBRARIES || strlen(path) >= PATH_MAX)
        return NULL;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return NULL;
    if (!load(library, &found[n_found].api)) {
        dlclose(library);
        return NULL;
    }
    /* A provider then keeps its queues from forked children, where kernels don't by themselves. */
    void *at = symbol(library, "ibv_fork_init");
    int (*fork_init)(void);
    memcpy(&fork_init, &at, sizeof fork_init);
    if (at)
        (void)fork_init();
    strcpy(found[n_found].path, path);
    return &found[n_found++].api;
}

const vb_api *lc_verbs_api(const char *library) {
    const char *path = library && *library ? library : DEFAULT;
    const vb_api *api = NULL;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < n_found && !api; i++)
        if (!strcmp(found[i].path, path))
            api = &found[i].api;
    if (!api)
        api = open_library(path);
    pthread_mutex_unlock(&lock);
    return api;
}
