#include "expr.h"

#include "errors.h"

namespace tkbuild {
namespace {

constexpr int kMaxInstructions = 256;
constexpr int kMaxStack = 32;

struct Operator {
  const char* name;
  Op op;
  bool infix;
};

constexpr Operator kOperators[] = {
    {"+", Op::kAdd, true},           {"-", Op::kSub, true},
    {"*", Op::kMul, true},           {"//", Op::kFloorDiv, true},
    {"%", Op::kFloorMod, true},      {"<", Op::kLess, true},
    {"<=", Op::kLessEqual, true},    {">", Op::kGreater, true},
    {">=", Op::kGreaterEqual, true}, {"==", Op::kEqual, true},
    {"!=", Op::kNotEqual, true},     {"min", Op::kMin, false},
    {"max", Op::kMax, false},        {"ceildiv", Op::kCeilDiv, false},
    {"align", Op::kAlign, false},    {"gcd", Op::kGcd, false},
};

const Operator* FindOperator(const char* name) {
  for (const Operator& candidate : kOperators) {
    if (strcmp(candidate.name, name) == 0) return &candidate;
  }
  return nullptr;
}

bool TakesManyOperands(Op op) {
  return op == Op::kAdd || op == Op::kMul || op == Op::kMin || op == Op::kMax || op == Op::kGcd;
}

class Compiler {
 public:
  Compiler(const Scope& scope, const char* where) : scope_(scope), where_(where) {}

  bool Compile(const Json& json) {
    switch (json.type) {
      case Json::Type::kInt:
      case Json::Type::kBool:
        text_.Add("%lld", static_cast<long long>(json.number));
        return Emit(Op::kConstant, 0, json.number);
      case Json::Type::kString:
        return CompileName(json.text);
      case Json::Type::kArray:
        return CompileCall(json);
      default:
        return Fail(kIntegrityError, "%s: expected an int, a name or [op, ...]; reinstall the kernel wheel", where_);
    }
  }

  Expr Finish(Arena& arena) const {
    Span<Instruction> code = arena.NewArray<Instruction>(size_);
    memcpy(code.data, code_, sizeof(Instruction) * static_cast<size_t>(size_));
    Expr expr = {Expr::Kind::kCode,
                 code_[0].operand,
                 code_[0].value,
                 arena.CopyString(text_.c_str(), strlen(text_.c_str())),
                 {code.data, code.size}};
    if (size_ == 1) expr.kind = code_[0].op == Op::kSlot ? Expr::Kind::kSlot : Expr::Kind::kConstant;
    return expr;
  }

 private:
  bool Emit(Op op, int operand = 0, int64_t value = 0) {
    if (size_ == kMaxInstructions) return Fail(kIntegrityError, "%s: the expression is too long", where_);
    code_[size_++] = {op, operand, value};
    if (op == Op::kConstant || op == Op::kSlot) {
      if (++depth_ > kMaxStack) return Fail(kIntegrityError, "%s: the expression is nested too deeply", where_);
    } else if (op != Op::kNegate && op != Op::kNot && op != Op::kJump) {
      --depth_;  // a binary operator, or the jumps that take the value they test
    }
    return true;
  }

  void JumpHere(int from) { code_[from].operand = size_; }

  bool CompileName(const char* name) {
    const Scope::Name found = scope_.Find(name);
    text_.Add("%s", name);
    if (found.kind == Scope::Kind::kConstant) return Emit(Op::kConstant, 0, found.value);
    if (found.kind == Scope::Kind::kInt) return Emit(Op::kSlot, found.slot);
    return Fail(kIntegrityError, "%s: '%s' is not an integer that this plan knows; build the kernel again", where_,
                name);
  }

  bool CompileCall(const Json& call) {
    if (call.size < 2 || !call.first->Is(Json::Type::kString)) {
      return Fail(kIntegrityError, "%s: expected [op, operand, ...]", where_);
    }
    const char* name = call.first->text;
    const Json* operands = call.first->next;
    const int count = call.size - 1;
    if (strcmp(name, "not") == 0 && count == 1) return CompileUnary("not ", Op::kNot, *operands);
    if (strcmp(name, "-") == 0 && count == 1) return CompileUnary("-", Op::kNegate, *operands);
    if (strcmp(name, "and") == 0 && count >= 2) return CompileLogic(" and ", Op::kJumpIfZeroElsePop, operands);
    if (strcmp(name, "or") == 0 && count >= 2) return CompileLogic(" or ", Op::kJumpIfNonZeroElsePop, operands);
    if (strcmp(name, "select") == 0 && count == 3) return CompileSelect(operands);
    const Operator* op = FindOperator(name);
    if (op == nullptr) return Fail(kIntegrityError, "%s: unknown operator '%s'; upgrade tkbuild", where_, name);
    if (count != 2 && (count < 2 || !TakesManyOperands(op->op))) {
      return Fail(kIntegrityError, "%s: operator '%s' got %d operands", where_, name, count);
    }
    return CompileFold(*op, operands);
  }

  bool CompileUnary(const char* prefix, Op op, const Json& operand) {
    text_.Add("%s", prefix);
    return Compile(operand) && Emit(op);
  }

  bool CompileFold(const Operator& op, const Json* operands) {
    text_.Add("%s(", op.infix ? "" : op.name);
    for (const Json* operand = operands; operand != nullptr; operand = operand->next) {
      if (operand != operands) {
        if (op.infix) text_.Add(" %s ", op.name);
        if (!op.infix) text_.Add(", ");
      }
      if (!Compile(*operand)) return false;
      if (operand != operands && !Emit(op.op)) return false;
    }
    text_.Add(")");
    return true;
  }

  // As in Python: the first operand that decides is the value, and what follows it is not evaluated.
  bool CompileLogic(const char* separator, Op jump, const Json* operands) {
    int pending[kMaxStack];
    int count = 0;
    text_.Add("(");
    for (const Json* operand = operands; operand != nullptr; operand = operand->next) {
      if (!Compile(*operand)) return false;
      if (operand->next == nullptr) break;
      if (count == kMaxStack) return Fail(kIntegrityError, "%s: the expression is too long", where_);
      text_.Add("%s", separator);
      pending[count++] = size_;
      if (!Emit(jump)) return false;
    }
    for (int i = 0; i < count; ++i) JumpHere(pending[i]);
    text_.Add(")");
    return true;
  }

  // Only the chosen branch is evaluated, so that `n // k if k else 0` is safe.
  bool CompileSelect(const Json* operands) {
    text_.Add("select(");
    if (!Compile(*operands)) return false;
    const int to_else = size_;
    if (!Emit(Op::kJumpIfZero)) return false;
    text_.Add(", ");
    if (!Compile(*operands->next)) return false;
    const int to_end = size_;
    if (!Emit(Op::kJump)) return false;
    --depth_;  // one of the two branches runs
    JumpHere(to_else);
    text_.Add(", ");
    if (!Compile(*operands->next->next)) return false;
    JumpHere(to_end);
    text_.Add(")");
    return true;
  }

  const Scope& scope_;
  const char* where_;
  Instruction code_[kMaxInstructions];
  int size_ = 0;
  int depth_ = 0;
  Text text_;
};

// The quotient rounded towards zero, and what is left. 32-bit division takes a fraction of the time of the 64-bit one.
inline EvalStatus Divide(int64_t a, int64_t b, int64_t* quotient, int64_t* rest) {
  if (((a | b) >> 32) == 0 && b != 0) {
    *quotient = static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
    *rest = static_cast<uint32_t>(a) % static_cast<uint32_t>(b);
    return EvalStatus::kOk;
  }
  if (b == 0) return EvalStatus::kDivisionByZero;
  if (a == INT64_MIN && b == -1) return EvalStatus::kOverflow;
  *quotient = a / b;
  *rest = a % b;
  return EvalStatus::kOk;
}

inline EvalStatus FloorDiv(int64_t a, int64_t b, int64_t* out) {
  int64_t rest = 0;
  const EvalStatus status = Divide(a, b, out, &rest);
  if (rest != 0 && (rest < 0) != (b < 0)) --*out;
  return status;
}

inline EvalStatus FloorMod(int64_t a, int64_t b, int64_t* out) {
  int64_t quotient = 0;
  if (b == -1) return *out = 0, EvalStatus::kOk;
  const EvalStatus status = Divide(a, b, &quotient, out);
  if (status == EvalStatus::kOk && *out != 0 && (*out < 0) != (b < 0)) *out += b;
  return status;
}

inline EvalStatus CeilDiv(int64_t a, int64_t b, int64_t* out) {
  int64_t rest = 0;
  const EvalStatus status = Divide(a, b, out, &rest);
  if (rest != 0 && (rest < 0) == (b < 0)) ++*out;
  return status;
}

EvalStatus Align(int64_t a, int64_t b, int64_t* out) {
  int64_t steps = 0;
  if (const EvalStatus status = CeilDiv(a, b, &steps); status != EvalStatus::kOk) return status;
  return __builtin_mul_overflow(steps, b, out) ? EvalStatus::kOverflow : EvalStatus::kOk;
}

EvalStatus Gcd(int64_t a, int64_t b, int64_t* out) {
  if (a == INT64_MIN || b == INT64_MIN) return EvalStatus::kOverflow;
  while (b != 0) {
    const int64_t rest = a % b;
    a = b;
    b = rest;
  }
  *out = a < 0 ? -a : a;
  return EvalStatus::kOk;
}

inline EvalStatus Checked(bool overflow) { return overflow ? EvalStatus::kOverflow : EvalStatus::kOk; }

[[gnu::always_inline]] inline EvalStatus Binary(Op op, int64_t a, int64_t b, int64_t* out) {
  switch (op) {
    case Op::kAdd:
      return Checked(__builtin_add_overflow(a, b, out));
    case Op::kSub:
      return Checked(__builtin_sub_overflow(a, b, out));
    case Op::kMul:
      return Checked(__builtin_mul_overflow(a, b, out));
    case Op::kFloorDiv:
      return FloorDiv(a, b, out);
    case Op::kFloorMod:
      return FloorMod(a, b, out);
    case Op::kCeilDiv:
      return CeilDiv(a, b, out);
    case Op::kAlign:
      return Align(a, b, out);
    case Op::kGcd:
      return Gcd(a, b, out);
    case Op::kLess:
      *out = a < b;
      break;
    case Op::kLessEqual:
      *out = a <= b;
      break;
    case Op::kGreater:
      *out = a > b;
      break;
    case Op::kGreaterEqual:
      *out = a >= b;
      break;
    case Op::kEqual:
      *out = a == b;
      break;
    case Op::kNotEqual:
      *out = a != b;
      break;
    case Op::kMin:
      *out = a < b ? a : b;
      break;
    case Op::kMax:
      *out = a > b ? a : b;
      break;
    default:
      __builtin_unreachable();
  }
  return EvalStatus::kOk;
}

}  // namespace

Scope::Name Scope::Find(const char* name) const {
  for (int i = 0; i < size_; ++i) {
    if (strcmp(names_[i], name) == 0) return meanings_[i];
  }
  return {};
}

const char* Scope::SlotName(int slot) const {
  for (int i = 0; i < size_; ++i) {
    if (meanings_[i].slot == slot) return names_[i];
  }
  return "?";
}

bool Scope::Add(const char* name, Name meaning) {
  if (size_ == kMaxNames || meaning.slot >= kMaxSlots) return false;
  names_[size_] = name;
  meanings_[size_++] = meaning;
  return true;
}

const char* Describe(EvalStatus status) {
  switch (status) {
    case EvalStatus::kOverflow:
      return "overflows 64 bits";
    case EvalStatus::kDivisionByZero:
      return "divides by zero";
    case EvalStatus::kOk:
      break;
  }
  return "ok";
}

EvalStatus Expr::Run(const int64_t* slots, int64_t* out) const {
  int64_t stack[kMaxStack + 1];
  int top = -1;
  for (int at = 0; at < code.size; ++at) {
    const Instruction& step = code[at];
    switch (step.op) {
      case Op::kConstant:
        stack[++top] = step.value;
        break;
      case Op::kSlot:
        stack[++top] = slots[step.operand];
        break;
      case Op::kJump:
        at = step.operand - 1;
        break;
      case Op::kJumpIfZero:
        if (stack[top--] == 0) at = step.operand - 1;
        break;
      case Op::kJumpIfZeroElsePop:
        if (stack[top] == 0)
          at = step.operand - 1;
        else
          --top;
        break;
      case Op::kJumpIfNonZeroElsePop:
        if (stack[top] != 0)
          at = step.operand - 1;
        else
          --top;
        break;
      case Op::kNegate:
        if (__builtin_sub_overflow(int64_t{0}, stack[top], &stack[top])) return EvalStatus::kOverflow;
        break;
      case Op::kNot:
        stack[top] = stack[top] == 0;
        break;
      default: {
        const int64_t right = stack[top--];
        const EvalStatus status = Binary(step.op, stack[top], right, &stack[top]);
        if (status != EvalStatus::kOk) return status;
      }
    }
  }
  *out = stack[top];
  return EvalStatus::kOk;
}

bool CompileExpr(Arena& arena, const Scope& scope, const Json& json, const char* where, Expr* out) {
  Compiler compiler(scope, where);
  if (!compiler.Compile(json)) return false;
  *out = compiler.Finish(arena);
  return true;
}

}  // namespace tkbuild
