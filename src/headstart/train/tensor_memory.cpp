/* A caching allocator for CPU tensors, in size classes. */

#include <c10/core/CPUAllocator.h>

#include <cstdint>
#include <cstdlib>
#include <mutex>

#include <pthread.h>

namespace {

constexpr size_t LINE = 64;       /* bytes; as torch aligns tensors */
constexpr size_t STEPS = 8;       /* size classes per power of two: less than an eighth above the lines needed */
constexpr size_t SIZES = 64 * STEPS;
constexpr size_t MOST = PTRDIFF_MAX / 2; /* bytes; torch raises for more */

/* Header in the line before a tensor's data. */
struct block {
    volatile uintptr_t mark; /* identifies our blocks; volatile, or stores before free are optimised away */
    block *next;
    size_t size_class;
};

std::mutex lock;
block *kept[SIZES];
size_t kept_bytes, most_bytes; /* a limit of 0 disables the cache */
c10::Allocator *torch_allocator;

size_t size_class_of(size_t bytes) {
    size_t lines = (bytes + LINE - 1) / LINE;
    if (lines < 2 * STEPS) return lines;
    size_t shift = 63 - __builtin_clzll(lines - 1) - __builtin_ctzll(STEPS);
    return STEPS * shift + ((lines - 1) >> shift) + 1;
}

size_t bytes_of(size_t size_class) {
    if (size_class < 2 * STEPS) return size_class * LINE;
    size_t shift = (size_class - 1) / STEPS - 1;
    return ((size_class - STEPS * shift) << shift) * LINE;
}

uintptr_t mark_of(const block *one) { return ~reinterpret_cast<uintptr_t>(one); }

void free_cached_blocks() {
    for (block *&first : kept)
        while (block *one = first) {
            first = one->next;
            one->mark = 0;
            std::free(one);
        }
    kept_bytes = 0;
}

block *find(size_t size_class) {
    if (block *one = kept[size_class]) {
        kept[size_class] = one->next;
        kept_bytes -= bytes_of(size_class);
        return one;
    }
    size_t bytes = LINE + bytes_of(size_class);
    block *one = static_cast<block *>(std::aligned_alloc(LINE, bytes));
    if (!one && kept_bytes) {
        free_cached_blocks();
        one = static_cast<block *>(std::aligned_alloc(LINE, bytes));
    }
    if (!one) return nullptr;
    one->mark = mark_of(one);
    one->size_class = size_class;
    return one;
}

void give_back(void *data) {
    if (!data) return;
    block *one = reinterpret_cast<block *>(static_cast<char *>(data) - LINE);
    if (one->mark != mark_of(one)) return torch_allocator->raw_deleter()(data); /* allocated by torch's allocator */
    std::lock_guard<std::mutex> held(lock);
    size_t bytes = bytes_of(one->size_class);
    if (kept_bytes + bytes > most_bytes) free_cached_blocks(); /* also drops sizes no longer in use */
    if (bytes > most_bytes) {
        one->mark = 0;
        std::free(one);
        return;
    }
    one->next = kept[one->size_class];
    kept[one->size_class] = one;
    kept_bytes += bytes;
}

struct Keeping final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        char *data = nullptr;
        if (bytes && bytes <= MOST) {
            std::lock_guard<std::mutex> held(lock);
            if (block *one = find(size_class_of(bytes))) data = reinterpret_cast<char *>(one) + LINE;
        }
        if (bytes && !data) return torch_allocator->allocate(bytes); /* raises torch's own error */
        return {data, data, &give_back, c10::Device(c10::DeviceType::CPU)};
    }

    c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

    void copy_data(void *to, const void *from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

} // namespace

/* Limit the cache to this many bytes; 0 releases all. Returns the cached bytes. */
extern "C" size_t set_cache_limit(size_t bytes) {
    std::lock_guard<std::mutex> held(lock);
    if (!torch_allocator && bytes) {
        pthread_atfork([] { lock.lock(); }, [] { lock.unlock(); }, [] { lock.unlock(); });
        torch_allocator = c10::GetCPUAllocator();
        c10::SetCPUAllocator(new Keeping, 0);
    }
    most_bytes = bytes;
    if (!bytes) free_cached_blocks();
    return kept_bytes;
}
