#include "plan.h"

#include <stdio.h>

#include "errors.h"
#include "plan_json.h"

namespace tkbuild {
namespace {

constexpr int kSchema = 1;
constexpr char kNumSms[] = "num_sms";

// Only plans that speak of the SM count pay for asking.
bool Mentions(const Json& json, const char* name) {
  if (json.Is(Json::Type::kString)) return strcmp(json.text, name) == 0;
  for (const Json* child = json.first; child != nullptr; child = child->next) {
    if (Mentions(*child, name)) return true;
  }
  return false;
}

class PlanReader {
 public:
  explicit PlanReader(Arena& arena) : arena_(arena), plan_(arena.New<Plan>()) {}

  const Plan* Read(const Json& root) {
    return ReadHeader(root) && ReadScope(root) && ReadArgs(*root.Find("args")) && ReadDims(root) && ReadChecks(root) &&
                   ReadTensorMaps(root) && ReadLaunches(root)
               ? plan_
               : nullptr;
  }

 private:
  bool ReadExpr(const Json& json, const char* where, Expr* out) {
    return CompileExpr(arena_, plan_->scope, json, where, out);
  }

  bool ReadExprs(const Json& object, const char* key, const char* where, int count, Expr* out) {
    const Json* list = nullptr;
    if (!ReadArray(object, key, where, count, true, &list)) return false;
    if (list->size != count) return Bad(Where(where, ".%s", key), Where("", "%d entries", count));
    int i = 0;
    for (const Json* entry = list->first; entry != nullptr; entry = entry->next, ++i) {
      if (!ReadExpr(*entry, Where(where, ".%s[%d]", key, i), &out[i])) return false;
    }
    return true;
  }

  bool ReadOptionalTriple(const Json& object, const char* key, const char* where, Expr* out) {
    if (object.Find(key) != nullptr) return ReadExprs(object, key, where, 3, out);
    static constexpr Json kOne = {Json::Type::kInt, 0, 1, nullptr, nullptr, nullptr, nullptr};
    return ReadExpr(kOne, where, &out[0]) && ReadExpr(kOne, where, &out[1]) && ReadExpr(kOne, where, &out[2]);
  }

  int FindArg(const char* name) const {
    for (int i = 0; i < plan_->args.size; ++i) {
      if (plan_->args[i].name != nullptr && strcmp(plan_->args[i].name, name) == 0) return i;
    }
    return -1;
  }

  bool ReadHeader(const Json& root) {
    static constexpr const char* kKeys[] = {"schema", "kernel", "variant", "arch",        "axes",
                                            "args",   "dims",   "checks",  "tensor_maps", "launches"};
    const Json* schema = root.Find("schema");
    if (schema == nullptr || !schema->Is(Json::Type::kInt)) return Bad("launch plan: schema", "an integer");
    if (schema->number != kSchema) {
      return Fail(kIntegrityError,
                  "launch plan: schema %lld, expected %d; install the versions of tkbuild and of the kernel wheel that "
                  "belong together",
                  static_cast<long long>(schema->number), kSchema);
    }
    const char* kernel = nullptr;
    if (!OnlyKeys(root, "launch plan", kKeys) || !ReadString(root, "kernel", "launch plan", &kernel) ||
        !ReadString(root, "variant", "launch plan", &plan_->variant)) {
      return false;
    }
    where_ =
        arena_.CopyString(Where(plan_->variant, ": launch plan: "), strlen(Where(plan_->variant, ": launch plan: ")));
    const Json* args = nullptr;
    return ReadArch(root) && ReadArray(root, "args", where_, kMaxArgs, true, &args);
  }

  // sm_90a: the last digit is the minor version.
  bool ReadArch(const Json& root) {
    const char* name = nullptr;
    if (!ReadString(root, "arch", where_, &name)) return false;
    int number = 0;
    int used = 0;
    if (sscanf(name, "sm_%3d%n", &number, &used) != 1 || number < 50) return Bad(Where(where_, "arch"), "sm_<NN>[a|f]");
    const char* suffix = name + used;
    const bool known = *suffix == '\0' || ((*suffix == 'a' || *suffix == 'f') && suffix[1] == '\0');
    if (!known) return Bad(Where(where_, "arch"), "sm_<NN>[a|f]");
    plan_->arch = {name, number / 10, number % 10, *suffix};
    return true;
  }

  // Names come from axes (constants), scalars and options, dims, and the bare names of shapes and strides.
  bool ReadScope(const Json& root) {
    plan_->num_sms_slot = -1;
    bool room = true;
    if (const Json* axes = root.Find("axes")) {
      if (!axes->Is(Json::Type::kObject)) return Bad(Where(where_, "axes"), "an object");
      for (const Json* axis = axes->first; axis != nullptr; axis = axis->next) {
        // Axes of other types take no part in expressions.
        if (axis->Is(Json::Type::kInt) || axis->Is(Json::Type::kBool)) {
          room = room && plan_->scope.AddConstant(axis->key, axis->number);
        }
      }
    }
    for (const Json* arg = root.Find("args")->first; arg != nullptr; arg = arg->next) {
      const Json* kind = arg->Find("kind");
      const Json* name = arg->Find("name");
      const Json* dtype = arg->Find("dtype");
      if (kind == nullptr || !kind->Is(Json::Type::kString) || strcmp(kind->text, "tensor") == 0) continue;
      if (name == nullptr || !name->Is(Json::Type::kString) || dtype == nullptr || !dtype->Is(Json::Type::kString)) {
        continue;  // refused with its place by ReadArgs
      }
      const Dtype* found = FindDtype(dtype->text);
      const bool is_float = found != nullptr && IsFloat(*found);
      room = room && plan_->scope.AddSlot(name->text, is_float ? Scope::Kind::kFloat : Scope::Kind::kInt);
    }
    first_dim_slot_ = plan_->scope.slots();
    for (const Json* arg = root.Find("args")->first; arg != nullptr; arg = arg->next) {
      room = room && AddDims(arg->Find("shape")) && AddDims(arg->Find("strides"));
    }
    const int end_dim_slot = plan_->scope.slots();
    room = room && plan_->scope.AddSlot(kNumSms, Scope::Kind::kInt);
    if (!room) return Bad(where_, Where("", "at most %d dims, scalars and options", kMaxSlots - 1));
    plan_->dim_slots = arena_.NewArray<int>(end_dim_slot - first_dim_slot_);
    for (int i = 0; i < plan_->dim_slots.size; ++i) plan_->dim_slots[i] = first_dim_slot_ + i;
    if (Mentions(root, kNumSms)) plan_->num_sms_slot = end_dim_slot;
    return true;
  }

  bool AddDims(const Json* extents) {
    if (extents == nullptr || !extents->Is(Json::Type::kArray)) return true;
    for (const Json* entry = extents->first; entry != nullptr; entry = entry->next) {
      if (!entry->Is(Json::Type::kString) || strcmp(entry->text, kNumSms) == 0) continue;
      if (plan_->scope.Find(entry->text).kind != Scope::Kind::kUnknown) continue;
      if (!plan_->scope.AddSlot(entry->text, Scope::Kind::kInt)) return false;
    }
    return true;
  }

  bool ReadArgs(const Json& list) {
    plan_->args = arena_.NewArray<Arg>(list.size);
    plan_->deferred = {arena_.NewArray<DeferredExtent>(2 * kMaxRank * list.size).data, 0};
    bool knows_device = false;
    int i = 0;
    for (const Json* entry = list.first; entry != nullptr; entry = entry->next, ++i) {
      if (!ReadArg(*entry, i, &plan_->args[i])) return false;
      knows_device = knows_device || (plan_->args[i].is_tensor && !plan_->args[i].optional);
      plan_->has_out = plan_->has_out || (plan_->args[i].is_tensor && plan_->args[i].role == Role::kOut);
    }
    return knows_device || Bad(Where(where_, "args"), "a tensor that is not optional, since it tells the device");
  }

  bool ReadArg(const Json& json, int index, Arg* arg) {
    static constexpr const char* kKeys[] = {"name",  "kind",    "role",  "dtype",   "shape",
                                            "strides", "align", "optional", "folds"};
    const Where where(where_, "args[%d]", index);
    const char* kind = nullptr;
    const char* name = nullptr;
    if (!OnlyKeys(json, where, kKeys) || !ReadString(json, "name", where, &name) ||
        !ReadString(json, "kind", where, &kind) || !ReadDtype(json, where, &arg->dtype)) {
      return false;
    }
    if (FindArg(name) >= 0) return Bad(Where(where, ".name"), "a name that no other argument has");
    arg->name = name;
    arg->is_tensor = strcmp(kind, "tensor") == 0;
    if (arg->is_tensor) return ReadTensorArg(json, index, where, arg);
    if (strcmp(kind, "scalar") != 0 && strcmp(kind, "option") != 0)
      return Bad(Where(where, ".kind"), "tensor, scalar or option");
    return ReadScalarArg(where, arg);
  }

  bool ReadScalarArg(const char* where, Arg* arg) {
    arg->slot = plan_->scope.Find(arg->name).slot;
    arg->is_float = IsFloat(*arg->dtype);
    if (arg->slot < 0) return Bad(Where(where, ".name"), "a name that is not an axis");
    return arg->is_float || IntRange(*arg->dtype, &arg->low, &arg->high) ||
           Bad(Where(where, ".dtype"), "an integer dtype, bool, float32 or float64");
  }

  bool ReadTensorArg(const Json& json, int index, const char* where, Arg* arg) {
    const Json* shape = nullptr;
    const Json* strides = nullptr;
    if (!ReadRole(json, where, &arg->role) || !ReadBool(json, "optional", where, &arg->optional) ||
        (json.Find("folds") != nullptr && !ReadBool(json, "folds", where, &arg->folds)) ||
        !ReadArray(json, "shape", where, kMaxRank, true, &shape) ||
        !ReadArray(json, "strides", where, kMaxRank, false, &strides)) {
      return false;
    }
    if (strides->size != 0 && strides->size != shape->size)
      return Bad(Where(where, ".strides"), "as many entries as shape has");
    int align_bytes = 1;
    if (json.Find("align") != nullptr && !ReadInt(json, "align", where, 1, 4096, &align_bytes)) return false;
    if ((align_bytes & (align_bytes - 1)) != 0) return Bad(Where(where, ".align"), "a power of two");
    arg->align_bytes = align_bytes;
    arg->rank = shape->size;
    return ReadExtents(*shape, index, false, Where(where, ".shape"), &arg->shape) &&
           ReadExtents(*strides, index, true, Where(where, ".strides"), &arg->strides);
  }

  bool ReadRole(const Json& json, const char* where, Role* out) {
    static constexpr struct {
      const char* name;
      Role role;
    } kRoles[] = {{"in", Role::kIn}, {"out", Role::kOut}, {"inout", Role::kInout}, {"workspace", Role::kWorkspace}};
    const char* name = nullptr;
    if (!ReadString(json, "role", where, &name)) return false;
    for (const auto& entry : kRoles) {
      if (strcmp(entry.name, name) == 0) return *out = entry.role, true;
    }
    return Bad(Where(where, ".role"), "in, out, inout or workspace");
  }

  bool ReadExtents(const Json& list, int arg, bool is_stride, const char* where, Span<Extent>* out) {
    *out = arena_.NewArray<Extent>(list.size);
    int axis = 0;
    for (const Json* entry = list.first; entry != nullptr; entry = entry->next, ++axis) {
      Extent& extent = (*out)[axis];
      if (!ReadExpr(*entry, Where(where, "[%d]", axis), &extent.expr)) return false;
      if (extent.expr.IsConstant()) {
        extent.kind = Extent::Kind::kConstant;
        extent.value = extent.expr.value;
      } else if (extent.expr.kind == Expr::Kind::kSlot && IsDim(extent.expr.slot)) {
        extent.kind = Extent::Kind::kDim;
        extent.slot = extent.expr.slot;
      } else {
        extent.kind = Extent::Kind::kExpr;
        plan_->deferred.data[plan_->deferred.size++] = {arg, axis, is_stride};
      }
    }
    return true;
  }

  bool IsDim(int slot) const { return slot >= first_dim_slot_ && slot < first_dim_slot_ + plan_->dim_slots.size; }

  bool ReadDims(const Json& root) {
    static constexpr const char* kKeys[] = {"dtype", "min", "max"};
    const Json* dims = root.Find("dims");
    if (dims == nullptr) return true;
    if (!dims->Is(Json::Type::kObject)) return Bad(Where(where_, "dims"), "an object");
    plan_->dim_ranges = {arena_.NewArray<DimRange>(dims->size).data, 0};
    for (const Json* dim = dims->first; dim != nullptr; dim = dim->next) {
      const Where where(where_, "dims.%s", dim->key);
      const Scope::Name name = plan_->scope.Find(dim->key);
      if (!OnlyKeys(*dim, where, kKeys)) return false;
      if (!IsDim(name.slot)) return Bad(where, "a name that stands alone in a shape or in strides");
      DimRange range = {name.slot, INT64_MIN, INT64_MAX};
      const Dtype* dtype = nullptr;
      if (dim->Find("dtype") != nullptr && !ReadDtype(*dim, where, &dtype)) return false;
      if (dtype != nullptr && !IntRange(*dtype, &range.low, &range.high))
        return Bad(Where(where, ".dtype"), "an integer dtype");
      if (!Tighten(*dim, where, &range)) return false;
      plan_->dim_ranges.data[plan_->dim_ranges.size++] = range;
    }
    return true;
  }

  bool Tighten(const Json& dim, const char* where, DimRange* range) {
    const Json* low = nullptr;
    const Json* high = nullptr;
    if (!ReadBound(dim, "min", where, &low) || !ReadBound(dim, "max", where, &high)) return false;
    if (low != nullptr && low->number > range->low) range->low = low->number;
    if (high != nullptr && high->number < range->high) range->high = high->number;
    return true;
  }

  // Absent or null means no bound.
  bool ReadBound(const Json& dim, const char* key, const char* where, const Json** out) {
    const Json* found = dim.Find(key);
    *out = found == nullptr || found->Is(Json::Type::kNull) ? nullptr : found;
    return *out == nullptr || found->Is(Json::Type::kInt) || Bad(Where(where, ".%s", key), "an integer");
  }

  bool ReadChecks(const Json& root) {
    static constexpr const char* kKeys[] = {"require", "text", "because"};
    const Json* list = nullptr;
    if (!ReadArray(root, "checks", where_, 1024, false, &list)) return false;
    plan_->checks = arena_.NewArray<Check>(list->size);
    int i = 0;
    for (const Json* entry = list->first; entry != nullptr; entry = entry->next, ++i) {
      const Where where(where_, "checks[%d]", i);
      Check& check = plan_->checks[i];
      if (!OnlyKeys(*entry, where, kKeys)) return false;
      const Json* require = entry->Find("require");
      if (require == nullptr) return Bad(Where(where, ".require"), "an expression");
      if (!ReadExpr(*require, Where(where, ".require"), &check.require)) return false;
      check.text = check.require.text;
      check.because = "";
      if (entry->Find("text") != nullptr && !ReadString(*entry, "text", where, &check.text)) return false;
      if (entry->Find("because") != nullptr && !ReadString(*entry, "because", where, &check.because)) return false;
    }
    return true;
  }

  bool ReadTensorMaps(const Json& root) {
    const Json* list = nullptr;
    if (!ReadArray(root, "tensor_maps", where_, kMaxTensorMaps, false, &list)) return false;
    plan_->tensor_maps = arena_.NewArray<TensorMap>(list->size);
    int i = 0;
    for (const Json* entry = list->first; entry != nullptr; entry = entry->next, ++i) {
      if (!ReadTensorMap(*entry, Where(where_, "tensor_maps[%d]", i), &plan_->tensor_maps[i])) return false;
    }
    return true;
  }

  bool ReadTensorMap(const Json& json, const char* where, TensorMap* map) {
    static constexpr const char* kKeys[] = {"arg",          "dtype",      "rank",    "dims", "strides", "box",
                                            "elem_strides", "interleave", "swizzle", "l2",   "oob"};
    const char* arg = nullptr;
    if (!OnlyKeys(json, where, kKeys) || !ReadString(json, "arg", where, &arg)) return false;
    map->arg = FindArg(arg);
    if (map->arg < 0 || !plan_->args[map->arg].is_tensor) return Bad(Where(where, ".arg"), "the name of a tensor");
    return ReadInt(json, "dtype", where, 0, 255, &map->dtype) &&
           ReadInt(json, "rank", where, 1, kMaxTensorMapRank, &map->rank) &&
           ReadExprs(json, "dims", where, map->rank, map->dims) &&
           ReadExprs(json, "strides", where, map->rank - 1, map->strides) &&
           ReadExprs(json, "box", where, map->rank, map->box) &&
           ReadExprs(json, "elem_strides", where, map->rank, map->element_strides) &&
           ReadInt(json, "interleave", where, 0, 255, &map->interleave) &&
           ReadInt(json, "swizzle", where, 0, 255, &map->swizzle) &&
           ReadInt(json, "l2", where, 0, 255, &map->l2_promotion) &&
           ReadInt(json, "oob", where, 0, 255, &map->oob_fill);
  }

  bool ReadLaunches(const Json& root) {
    const Json* list = nullptr;
    if (!ReadArray(root, "launches", where_, kMaxLaunches, true, &list)) return false;
    if (list->size == 0) return Bad(Where(where_, "launches"), "at least one launch");
    plan_->launches = arena_.NewArray<Launch>(list->size);
    int i = 0;
    for (const Json* entry = list->first; entry != nullptr; entry = entry->next, ++i) {
      if (!ReadLaunch(*entry, Where(where_, "launches[%d]", i), &plan_->launches[i])) return false;
    }
    return true;
  }

  bool ReadLaunch(const Json& json, const char* where, Launch* launch) {
    static constexpr const char* kKeys[] = {"function",           "params",      "grid",        "block", "cluster",
                                            "dynamic_smem_bytes", "cooperative", "programmatic"};
    const Json* params = nullptr;
    const Json* smem = json.Find("dynamic_smem_bytes");
    if (!OnlyKeys(json, where, kKeys) || !ReadString(json, "function", where, &launch->function) ||
        !ReadArray(json, "params", where, kMaxParams, true, &params) ||
        !ReadExprs(json, "grid", where, 3, launch->grid) || !ReadExprs(json, "block", where, 3, launch->block) ||
        !ReadOptionalTriple(json, "cluster", where, launch->cluster) ||
        !ReadBool(json, "cooperative", where, &launch->cooperative) || !ReadProgrammatic(json, where, launch)) {
      return false;
    }
    static constexpr Json kZero = {Json::Type::kInt, 0, 0, nullptr, nullptr, nullptr, nullptr};
    if (!ReadExpr(smem != nullptr ? *smem : kZero, Where(where, ".dynamic_smem_bytes"), &launch->dynamic_smem_bytes)) {
      return false;
    }
    launch->params = arena_.NewArray<Param>(params->size);
    int i = 0;
    for (const Json* entry = params->first; entry != nullptr; entry = entry->next, ++i) {
      if (!ReadParam(*entry, Where(where, ".params[%d]", i), &launch->params[i])) return false;
    }
    return true;
  }

  bool ReadProgrammatic(const Json& json, const char* where, Launch* launch) {
    static constexpr struct {
      const char* name;
      Programmatic value;
    } kValues[] = {{"off", Programmatic::kOff}, {"setting", Programmatic::kSetting}, {"on", Programmatic::kOn}};
    const char* name = "off";
    if (json.Find("programmatic") != nullptr && !ReadString(json, "programmatic", where, &name)) return false;
    for (const auto& entry : kValues) {
      if (strcmp(entry.name, name) == 0) return launch->programmatic = entry.value, true;
    }
    return Bad(Where(where, ".programmatic"), "off, setting or on");
  }

  bool ReadParam(const Json& json, const char* where, Param* param) {
    static constexpr const char* kKeys[] = {"pointer", "tensor_map", "value", "dtype"};
    if (!OnlyKeys(json, where, kKeys)) return false;
    if (json.Find("pointer") != nullptr) {
      const char* name = nullptr;
      if (!ReadString(json, "pointer", where, &name)) return false;
      param->kind = Param::Kind::kPointer;
      param->index = FindArg(name);
      const bool found = param->index >= 0 && plan_->args[param->index].is_tensor;
      return found || Bad(Where(where, ".pointer"), "the name of a tensor");
    }
    if (json.Find("tensor_map") != nullptr) {
      param->kind = Param::Kind::kTensorMap;
      return ReadInt(json, "tensor_map", where, 0, plan_->tensor_maps.size - 1, &param->index);
    }
    return ReadValueParam(json, where, param);
  }

  bool ReadValueParam(const Json& json, const char* where, Param* param) {
    const Json* value = json.Find("value");
    const Dtype* dtype = nullptr;
    if (value == nullptr) return Bad(where, "one of pointer, tensor_map and value");
    if (!ReadDtype(json, where, &dtype)) return false;
    param->dtype = dtype->name;
    param->index = -1;
    if (!IsFloat(*dtype)) {
      param->kind = Param::Kind::kInt;
      if (!IntRange(*dtype, &param->low, &param->high))
        return Bad(Where(where, ".dtype"), "an integer dtype, bool, float32 or float64");
      return ReadExpr(*value, Where(where, ".value"), &param->value);
    }
    param->kind = dtype->dlpack.bits == 32 ? Param::Kind::kFloat32 : Param::Kind::kFloat64;
    if (value->Is(Json::Type::kString)) {
      const Scope::Name name = plan_->scope.Find(value->text);
      if (name.kind == Scope::Kind::kFloat) return param->index = name.slot, true;
    }
    return ReadExpr(*value, Where(where, ".value"), &param->value);
  }

  Arena& arena_;
  Plan* plan_;
  const char* where_ = "launch plan: ";
  int first_dim_slot_ = 0;
};

}  // namespace

const Plan* ReadPlan(Arena& arena, const char* json, size_t size) {
  const Json* root = ParseJson(arena, json, size);
  if (root == nullptr) return nullptr;
  if (!root->Is(Json::Type::kObject)) {
    Bad("launch plan", "an object");
    return nullptr;
  }
  return PlanReader(arena).Read(*root);
}

bool RunsOn(const TargetArch& arch, int major, int minor) {
  if (arch.major != major) return false;
  return arch.suffix == 'a' ? arch.minor == minor : arch.minor <= minor;
}

}  // namespace tkbuild
