// Ranks of one communicator in shared memory: a barrier, a slot for each rank, a box for each pair. A rank
// that does not come, or comes with another collective, is an error with its name, where a card would wait
// for ever.
#define _GNU_SOURCE
#include "world.h"
#include <fcntl.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static char last_error[256] = "no error";

const char *world_error(void) { return last_error; }

static size_t bytes_of(int ranks) {
    return sizeof(struct shared) + (size_t)ranks * SLOT_BYTES + (size_t)ranks * ranks * sizeof(struct box);
}

struct world *world_open(const char *name, int ranks, int rank) {
    struct world *world = calloc(1, sizeof *world);
    snprintf(world->name, sizeof world->name, "%s", name);
    world->ranks = ranks;
    world->rank = rank;
    world->device = current_device();
    if (ranks == 1 || settings.alone)
        return world;
    char path[128];
    snprintf(path, sizeof path, "/dev/shm/%s", name);
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, (off_t)bytes_of(ranks)))
        return NULL;
    char *mapped = mmap(NULL, bytes_of(ranks), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED)
        return NULL;
    world->shared = (struct shared *)mapped;
    world->slots = mapped + sizeof(struct shared);
    world->boxes = (struct box *)(world->slots + (size_t)ranks * SLOT_BYTES);
    if (!world_meet(world))
        return NULL;
    if (rank == 0)
        unlink(path); // all ranks have it open
    return world;
}

void world_close(struct world *world) {
    if (world->shared)
        munmap(world->shared, bytes_of(world->ranks));
    free(world);
}

bool world_fail(struct world *world, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(last_error, sizeof last_error, format, values);
    va_end(values);
    fprintf(stderr, "null device: rank %d of %s: %s\n", world->rank, world->name, last_error);
    if (world->shared && !atomic_exchange(&world->shared->broken, 1))
        memcpy(world->shared->why, last_error, sizeof last_error);
    return false;
}

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static bool late(struct world *world) {
    char missing[128] = "";
    for (int rank = 0; rank < world->ranks; rank++) {
        size_t length = strlen(missing);
        if (atomic_load(&world->shared->done[rank]) < world->collectives)
            snprintf(missing + length, sizeof missing - length, " %d (after %lu, %s)", rank,
                     atomic_load(&world->shared->done[rank]), world->shared->said[rank].operation);
    }
    const char *doing = world->shared->said[world->rank].operation;
    return world_fail(world, "collective %lu (%s) waited %d s for ranks%s", world->collectives, doing,
                      settings.patience_s, missing);
}

bool world_meet(struct world *world) {
    struct shared *shared = world->shared;
    int round = atomic_load(&shared->round);
    if (atomic_fetch_add(&shared->arrived, 1) + 1 == world->ranks) {
        atomic_store(&shared->arrived, 0);
        atomic_fetch_add(&shared->round, 1);
        return true;
    }
    double end = now_s() + settings.patience_s;
    for (int turns = 0; atomic_load(&shared->round) == round; turns++) {
        if (atomic_load(&shared->broken)) {
            snprintf(last_error, sizeof last_error, "%s", shared->why);
            return false;
        }
        if (turns < 50)
            sched_yield();
        else
            usleep(turns < 1000 ? 50 : 1000);
        if (turns % 256 == 255 && now_s() > end)
            return late(world);
    }
    return true;
}

bool world_agree(struct world *world, const struct said *said) {
    world->collectives++;
    if (!world->shared)
        return true;
    struct shared *shared = world->shared;
    shared->said[world->rank] = *said;
    atomic_store(&shared->done[world->rank], world->collectives);
    if (!world_meet(world))
        return false;
    bool same = true;
    for (int rank = 0; rank < world->ranks && same; rank++) {
        const struct said *other = &shared->said[rank];
        if (!memcmp(other, said, sizeof *said))
            continue;
        same = world_fail(
            world,
            "collective %lu is %s of %zu elements of type %d here, on rank %d it is %s of %zu of type %d",
            world->collectives, said->operation, said->elements, said->type, rank, other->operation,
            other->elements, other->type);
    }
    return world_meet(world) && same;
}
