// Memory without a C++ runtime: an arena for a launch plan, and `new` on malloc.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

namespace tkbuild {

// An array that lives in an Arena.
template <typename T>
struct Span {
  T* data = nullptr;
  int size = 0;

  T* begin() const { return data; }
  T* end() const { return data + size; }
  T& operator[](int index) const { return data[index]; }
};

// Base of what is made by `new`. A process that cannot get a few kilobytes cannot report an error either.
struct HeapObject {
  static void* operator new(size_t bytes) {
    void* memory = malloc(bytes);
    if (memory == nullptr) abort();
    return memory;
  }
  static void operator delete(void* memory) { free(memory); }
};

// Memory that is allocated piece by piece and freed as a whole. Holds plain values only: no destructor of them is run.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() {
    while (blocks_ != nullptr) {
      Block* previous = blocks_->previous;
      free(blocks_);
      blocks_ = previous;
    }
  }

  // Zeroed memory for `count` values.
  template <typename T>
  Span<T> NewArray(int count) {
    return {static_cast<T*>(Allocate(sizeof(T) * static_cast<size_t>(count))), count};
  }

  template <typename T>
  T* New() {
    return NewArray<T>(1).data;
  }

  const char* CopyString(const char* text, size_t size) {
    char* copy = static_cast<char*>(Allocate(size + 1));
    memcpy(copy, text, size);
    return copy;
  }

 private:
  struct alignas(16) Block {
    Block* previous;
    size_t capacity;
    size_t used;
  };
  static constexpr size_t kBlockBytes = 16 * 1024;

  void* Allocate(size_t bytes) {
    bytes = (bytes + 15) & ~size_t{15};
    if (blocks_ == nullptr || blocks_->capacity - blocks_->used < bytes) AddBlock(bytes);
    char* result = reinterpret_cast<char*>(blocks_ + 1) + blocks_->used;
    blocks_->used += bytes;
    return result;
  }

  void AddBlock(size_t bytes) {
    const size_t capacity = bytes > kBlockBytes ? bytes : kBlockBytes;
    Block* block = static_cast<Block*>(calloc(1, sizeof(Block) + capacity));
    if (block == nullptr) abort();
    block->previous = blocks_;
    block->capacity = capacity;
    blocks_ = block;
  }

  Block* blocks_ = nullptr;
};

}  // namespace tkbuild
