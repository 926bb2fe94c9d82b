// Integer expressions of a launch plan: compiled to postfix code once, evaluated at every call.
#pragma once

#include "json.h"

namespace tkbuild {

inline constexpr int kMaxSlots = 64;

// What the names of a plan's expressions stand for: a constant (an int axis) or a slot filled at each call.
class Scope {
 public:
  enum class Kind { kUnknown, kConstant, kInt, kFloat };
  struct Name {
    Kind kind = Kind::kUnknown;
    int64_t value = 0;  // kConstant
    int slot = -1;      // kInt, kFloat
  };

  Name Find(const char* name) const;
  bool AddConstant(const char* name, int64_t value) { return Add(name, {Kind::kConstant, value, -1}); }
  bool AddSlot(const char* name, Kind kind) { return Add(name, {kind, 0, slots_}) && (++slots_, true); }
  const char* SlotName(int slot) const;
  int slots() const { return slots_; }

 private:
  static constexpr int kMaxNames = 2 * kMaxSlots;

  // False when the scope is full.
  bool Add(const char* name, Name meaning);

  const char* names_[kMaxNames] = {};
  Name meanings_[kMaxNames] = {};
  int size_ = 0;
  int slots_ = 0;
};

enum class Op : uint8_t {
  kConstant,
  kSlot,
  kJump,
  kJumpIfZero,
  kJumpIfZeroElsePop,
  kJumpIfNonZeroElsePop,
  kNegate,
  kNot,
  kAdd,
  kSub,
  kMul,
  kFloorDiv,
  kFloorMod,
  kLess,
  kLessEqual,
  kGreater,
  kGreaterEqual,
  kEqual,
  kNotEqual,
  kMin,
  kMax,
  kCeilDiv,
  kAlign,
  kGcd,
};

struct Instruction {
  Op op;
  int32_t operand;  // slot, or jump target
  int64_t value;    // kConstant
};

enum class EvalStatus { kOk, kOverflow, kDivisionByZero };

struct Expr {
  enum class Kind : uint8_t { kConstant, kSlot, kCode };

  Kind kind;
  int32_t slot;      // kSlot
  int64_t value;     // kConstant
  const char* text;  // as written in a spec, for messages
  Span<const Instruction> code;

  bool IsConstant() const { return kind == Kind::kConstant; }

  EvalStatus Evaluate(const int64_t* slots, int64_t* out) const {
    if (kind == Kind::kCode) return Run(slots, out);
    *out = kind == Kind::kSlot ? slots[slot] : value;
    return EvalStatus::kOk;
  }

 private:
  EvalStatus Run(const int64_t* slots, int64_t* out) const;
};

const char* Describe(EvalStatus status);

// False with an IntegrityError raised that names `where`. Names must be in `scope`.
bool CompileExpr(Arena& arena, const Scope& scope, const Json& json, const char* where, Expr* out);

}  // namespace tkbuild
