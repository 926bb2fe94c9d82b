// Atomics and locks on compiler builtins and pthreads, so that the library needs no C++ runtime.
#pragma once

#include <pthread.h>

namespace tkbuild {

template <typename T>
class Atomic {
 public:
  constexpr explicit Atomic(T value = T{}) : value_(value) {}
  T Load() const { return __atomic_load_n(&value_, __ATOMIC_ACQUIRE); }
  void Store(T value) { __atomic_store_n(&value_, value, __ATOMIC_RELEASE); }
  void Add(T value) { __atomic_fetch_add(&value_, value, __ATOMIC_RELAXED); }

 private:
  T value_;
};

class Mutex {
 public:
  void Lock() { pthread_mutex_lock(&mutex_); }
  void Unlock() { pthread_mutex_unlock(&mutex_); }

 private:
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
};

class LockGuard {
 public:
  explicit LockGuard(Mutex& mutex) : mutex_(mutex) { mutex_.Lock(); }
  ~LockGuard() { mutex_.Unlock(); }
  LockGuard(const LockGuard&) = delete;
  LockGuard& operator=(const LockGuard&) = delete;

 private:
  Mutex& mutex_;
};

}  // namespace tkbuild
