// NCCL between the processes of this machine, with real data; or, with NULLGPU_NCCL=alone, of one rank whose
// peers are only believed in. A collective is over when the call returns. What was asked is recorded by rank.
#define _GNU_SOURCE
#include "numbers.h"
#include "world.h"
#include <nccl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

struct ncclComm {
    struct world *world;
};

struct message {
    struct world *world;
    bool sends;
    char *at;
    size_t bytes, done;
    int peer;
};

static __thread int depth; // of ncclGroupStart
static __thread struct message pending[1024];
static __thread int waiting;

// --- communicators

ncclResult_t ncclGetVersion(int *out) {
    *out = NCCL_VERSION_CODE;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *out) {
    unsigned long number = 0;
    memset(out, 0, sizeof *out);
    if (getrandom(&number, sizeof number, 0) < 0)
        return ncclSystemError;
    snprintf(out->internal, sizeof out->internal, "nullgpu-%016lx", number);
    return ncclSuccess;
}

static ncclResult_t open_comm(ncclComm_t *out, const char *name, int ranks, int rank) {
    if (ranks > MOST_RANKS && !settings.alone)
        return ncclInvalidArgument;
    struct world *world = world_open(name, ranks, rank);
    if (!world)
        return ncclSystemError;
    *out = malloc(sizeof **out);
    (*out)->world = world;
    return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *out, int ranks, ncclUniqueId id, int rank) {
    return open_comm(out, id.internal, ranks, rank);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
    return open_comm(out, id.internal, ranks, rank);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *out, int ranks, int rank, int n, ncclUniqueId *ids,
                                      ncclConfig_t *c) {
    return open_comm(out, ids[0].internal, ranks, rank);
}

// The ranks of a colour in the order of their keys.
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *out, ncclConfig_t *config) {
    struct world *world = comm->world;
    struct said said = {.operation = "split"};
    if (!world_agree(world, &said))
        return ncclInvalidUsage;
    int child = ++world->children, ranks = 1, rank = 0;
    if (world->shared) {
        int mine[2] = {color, key};
        memcpy(world_slot(world, world->rank), mine, sizeof mine);
        if (!world_meet(world))
            return ncclSystemError;
        ranks = rank = 0;
        for (int other = 0; other < world->ranks; other++) {
            int theirs[2];
            memcpy(theirs, world_slot(world, other), sizeof theirs);
            bool before = theirs[1] < key || (theirs[1] == key && other < world->rank);
            ranks += theirs[0] == color;
            rank += theirs[0] == color && before;
        }
        if (!world_meet(world))
            return ncclSystemError;
    }
    *out = NULL;
    if (color == NCCL_SPLIT_NOCOLOR)
        return ncclSuccess;
    char name[64];
    snprintf(name, sizeof name, "%.40s.%d.%d", world->name, child, color);
    return open_comm(out, name, ranks, rank);
}

static ncclResult_t end(ncclComm_t comm) {
    if (comm) {
        world_close(comm->world);
        free(comm);
    }
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) { return end(comm); }
ncclResult_t ncclCommAbort(ncclComm_t comm) { return end(comm); }
ncclResult_t ncclCommFinalize(ncclComm_t comm) { return ncclSuccess; }

ncclResult_t ncclCommCount(const ncclComm_t comm, int *out) {
    *out = comm->world->ranks;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *out) {
    *out = comm->world->rank;
    return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *out) {
    *out = comm->world->device;
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *out) {
    *out = ncclSuccess;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t error) {
    return error ? "an error of the null device's NCCL" : "no error";
}
const char *ncclGetLastError(ncclComm_t comm) { return world_error(); }

ncclResult_t ncclMemAlloc(void **out, size_t bytes) {
    return cudaMalloc(out, bytes) ? ncclSystemError : ncclSuccess;
}
ncclResult_t ncclMemFree(void *pointer) { return cudaFree(pointer) ? ncclSystemError : ncclSuccess; }

// --- collectives

// Says to all what comes, and notes it. `moves`: whether data are exchanged as well.
static bool begin(struct world *world, const struct said *said, bool *moves) {
    size_t bytes = said->elements * number_bytes(said->type);
    char line[256];
    snprintf(line, sizeof line, "%s\t%d\t%d\t%lu\t%s\t%zu\t%d\t%d\t%d", world->name, world->ranks,
             world->rank, world->collectives, said->operation, said->elements, said->type, said->reduction,
             said->root);
    note_collective(line);
    count("collective", said->operation, bytes);
    *moves = world->shared && bytes <= settings.copy_bytes;
    return world_agree(world, said);
}

// Elements of a rank that one round exchanges.
static size_t round_of(const struct said *said, size_t shares) {
    return SLOT_BYTES / shares / number_bytes(said->type);
}

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

static bool reduce(struct world *world, const char *in, char *out, const struct said *said) {
    size_t width = number_bytes(said->type), step = round_of(said, 1);
    for (size_t at = 0; at < said->elements; at += step) {
        size_t n = least(step, said->elements - at);
        memcpy(world_slot(world, world->rank), in + at * width, n * width);
        if (!world_meet(world))
            return false;
        if (out)
            numbers_reduce(out + at * width, world->slots, SLOT_BYTES, world->ranks, n, said->type,
                           said->reduction);
        if (!world_meet(world))
            return false;
    }
    return true;
}

ncclResult_t ncclAllReduce(const void *in, void *out, size_t n, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
    struct said said = {.operation = "all-reduce", .elements = n, .type = type, .reduction = op};
    bool moves;
    if (!begin(comm->world, &said, &moves))
        return ncclInvalidUsage;
    if (moves)
        return reduce(comm->world, in, out, &said) ? ncclSuccess : ncclSystemError;
    if (in != out)
        copy(out, in, n * number_bytes(type));
    return ncclSuccess;
}

ncclResult_t ncclReduce(const void *in, void *out, size_t n, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
    struct said said = {.operation = "reduce", .elements = n, .type = type, .reduction = op, .root = root};
    struct world *world = comm->world;
    bool moves;
    if (!begin(world, &said, &moves))
        return ncclInvalidUsage;
    if (moves)
        return reduce(world, in, world->rank == root ? out : NULL, &said) ? ncclSuccess : ncclSystemError;
    if (in != out && world->rank == root)
        copy(out, in, n * number_bytes(type));
    return ncclSuccess;
}

ncclResult_t ncclReduceScatter(const void *in, void *out, size_t n, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
    struct said said = {.operation = "reduce-scatter", .elements = n, .type = type, .reduction = op};
    struct world *world = comm->world;
    size_t width = number_bytes(type);
    bool moves;
    if (!begin(world, &said, &moves))
        return ncclInvalidUsage;
    if (!moves) {
        const char *own = (const char *)in + (size_t)world->rank * n * width;
        if (own != out)
            copy(out, own, n * width);
        return ncclSuccess;
    }
    size_t step = round_of(&said, (size_t)world->ranks);
    for (size_t at = 0; at < n; at += step) {
        size_t now = least(step, n - at);
        char *slot = world_slot(world, world->rank);
        for (int to = 0; to < world->ranks; to++)
            memcpy(slot + (size_t)to * step * width, (const char *)in + ((size_t)to * n + at) * width,
                   now * width);
        if (!world_meet(world))
            return ncclSystemError;
        const char *shares = world->slots + (size_t)world->rank * step * width;
        numbers_reduce((char *)out + at * width, shares, SLOT_BYTES, world->ranks, now, type, op);
        if (!world_meet(world))
            return ncclSystemError;
    }
    return ncclSuccess;
}

ncclResult_t ncclAllGather(const void *in, void *out, size_t n, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
    struct said said = {.operation = "all-gather", .elements = n, .type = type};
    struct world *world = comm->world;
    size_t width = number_bytes(type), step = round_of(&said, 1);
    bool moves;
    if (!begin(world, &said, &moves))
        return ncclInvalidUsage;
    if (!moves) {
        char *own = (char *)out + (size_t)world->rank * n * width;
        if (own != in)
            copy(own, in, n * width);
        return ncclSuccess;
    }
    for (size_t at = 0; at < n; at += step) {
        size_t bytes = least(step, n - at) * width;
        memcpy(world_slot(world, world->rank), (const char *)in + at * width, bytes);
        if (!world_meet(world))
            return ncclSystemError;
        for (int rank = 0; rank < world->ranks; rank++)
            memcpy((char *)out + ((size_t)rank * n + at) * width, world_slot(world, rank), bytes);
        if (!world_meet(world))
            return ncclSystemError;
    }
    return ncclSuccess;
}

ncclResult_t ncclBroadcast(const void *in, void *out, size_t n, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
    struct said said = {.operation = "broadcast", .elements = n, .type = type, .root = root};
    struct world *world = comm->world;
    size_t width = number_bytes(type), step = round_of(&said, 1);
    bool moves;
    if (!begin(world, &said, &moves))
        return ncclInvalidUsage;
    if (world->rank == root && in != out)
        copy(out, in, n * width);
    for (size_t at = 0; moves && at < n; at += step) {
        size_t bytes = least(step, n - at) * width;
        if (world->rank == root)
            memcpy(world_slot(world, root), (const char *)in + at * width, bytes);
        if (!world_meet(world))
            return ncclSystemError;
        if (world->rank != root)
            memcpy((char *)out + at * width, world_slot(world, root), bytes);
        if (!world_meet(world))
            return ncclSystemError;
    }
    return ncclSuccess;
}

ncclResult_t ncclBcast(void *at, size_t n, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
    return ncclBroadcast(at, at, n, type, root, comm, stream);
}

// --- messages between two ranks: all of a group together, whatever their order

static bool move(struct message *m) {
    struct world *world = m->world;
    struct box *box =
        m->sends ? world_box(world, world->rank, m->peer) : world_box(world, m->peer, world->rank);
    if (atomic_load(&box->full) == (m->sends ? 1 : 0))
        return false;
    if (m->sends) {
        box->bytes = least(BOX_BYTES, m->bytes - m->done);
        memcpy(box->data, m->at + m->done, box->bytes);
    } else {
        memcpy(m->at + m->done, box->data, least(box->bytes, m->bytes - m->done));
    }
    m->done += box->bytes;
    atomic_store(&box->full, m->sends ? 1 : 0);
    return true;
}

static ncclResult_t exchange(void) {
    time_t end = time(NULL) + settings.patience_s;
    for (bool open = true; open;) {
        bool moved = open = false;
        for (int i = 0; i < waiting; i++) {
            struct message *m = &pending[i];
            bool earlier = false; // between two ranks messages keep their order
            for (int j = 0; j < i; j++)
                earlier |= pending[j].done < pending[j].bytes && pending[j].peer == m->peer &&
                           pending[j].sends == m->sends;
            if (m->done < m->bytes && !earlier)
                moved |= move(m);
            open |= m->done < m->bytes;
        }
        if (open && !moved)
            usleep(50);
        if (open && time(NULL) > end) {
            world_fail(pending[0].world, "a message between ranks waited %d s", settings.patience_s);
            waiting = 0;
            return ncclSystemError;
        }
    }
    waiting = 0;
    return ncclSuccess;
}

static ncclResult_t message(bool sends, void *at, size_t n, ncclDataType_t type, int peer, ncclComm_t comm) {
    struct world *world = comm->world;
    size_t bytes = n * number_bytes(type);
    count("collective", sends ? "send" : "receive", bytes);
    if (!world->shared || bytes > settings.copy_bytes)
        return ncclSuccess;
    if (waiting == sizeof pending / sizeof *pending)
        return ncclInternalError;
    pending[waiting++] = (struct message){world, sends, at, bytes, 0, peer};
    return depth ? ncclSuccess : exchange();
}

ncclResult_t ncclSend(const void *at, size_t n, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    return message(true, (void *)at, n, type, peer, comm);
}

ncclResult_t ncclRecv(void *at, size_t n, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    return message(false, at, n, type, peer, comm);
}

ncclResult_t ncclGroupStart(void) {
    depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) {
    depth--;
    return depth || !waiting ? ncclSuccess : exchange();
}

ncclResult_t ncclAlltoAll(const void *in, void *out, size_t n, ncclDataType_t type, ncclComm_t comm,
                          cudaStream_t stream) {
    struct said said = {.operation = "all-to-all", .elements = n, .type = type};
    size_t bytes = n * number_bytes(type);
    bool moves;
    if (!begin(comm->world, &said, &moves))
        return ncclInvalidUsage;
    ncclGroupStart();
    for (int peer = 0; moves && peer < comm->world->ranks; peer++) {
        message(true, (char *)in + (size_t)peer * bytes, n, type, peer, comm);
        message(false, (char *)out + (size_t)peer * bytes, n, type, peer, comm);
    }
    return ncclGroupEnd();
}
