#include "json.h"

#include "errors.h"

namespace tkbuild {
namespace {

constexpr int kMaxDepth = 64;

class Parser {
 public:
  Parser(Arena& arena, const char* text, size_t size) : arena_(arena), begin_(text), at_(text), end_(text + size) {}

  const Json* ParseDocument() {
    Json* root = arena_.New<Json>();
    if (!ParseValue(root, 0)) return nullptr;
    SkipSpace();
    if (at_ != end_) {
      Error("text after the end of the value");
      return nullptr;
    }
    return root;
  }

 private:
  bool Error(const char* what) {
    return Fail(kIntegrityError, "launch plan: not valid JSON at byte %td: %s; reinstall the kernel wheel",
                at_ - begin_, what);
  }

  char Peek() const { return at_ < end_ ? *at_ : '\0'; }

  void SkipSpace() {
    while (at_ < end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\t' || *at_ == '\r')) ++at_;
  }

  bool ParseValue(Json* out, int depth) {
    if (depth > kMaxDepth) return Error("nested too deeply");
    SkipSpace();
    switch (Peek()) {
      case '{':
        return ParseChildren(out, depth, Json::Type::kObject, '}');
      case '[':
        return ParseChildren(out, depth, Json::Type::kArray, ']');
      case '"':
        out->type = Json::Type::kString;
        return ParseString(&out->text);
      case 't':
        return ParseWord(out, "true", Json::Type::kBool, 1);
      case 'f':
        return ParseWord(out, "false", Json::Type::kBool, 0);
      case 'n':
        return ParseWord(out, "null", Json::Type::kNull, 0);
      default:
        return ParseInt(out);
    }
  }

  bool ParseWord(Json* out, const char* word, Json::Type type, int64_t number) {
    const size_t size = strlen(word);
    if (static_cast<size_t>(end_ - at_) < size || memcmp(at_, word, size) != 0) return Error("unknown word");
    at_ += size;
    out->type = type;
    out->number = number;
    return true;
  }

  bool ParseInt(Json* out) {
    const bool negative = Peek() == '-';
    if (negative) ++at_;
    const char* digits = at_;
    int64_t value = 0;
    for (; at_ < end_ && *at_ >= '0' && *at_ <= '9'; ++at_) {
      const int digit = *at_ - '0';
      if (__builtin_mul_overflow(value, int64_t{10}, &value) ||
          __builtin_add_overflow(value, negative ? -digit : digit, &value)) {
        return Error("integer beyond 64 bits");
      }
    }
    if (at_ == digits) return Error("a value was expected");
    if (Peek() == '.' || Peek() == 'e' || Peek() == 'E') return Error("numbers must be integers");
    out->type = Json::Type::kInt;
    out->number = value;
    return true;
  }

  bool ParseChildren(Json* out, int depth, Json::Type type, char close) {
    out->type = type;
    ++at_;
    SkipSpace();
    if (Peek() == close) return ++at_, true;
    const Json** tail = &out->first;
    for (;;) {
      Json* child = arena_.New<Json>();
      if (type == Json::Type::kObject && !ParseKey(out, child)) return false;
      if (!ParseValue(child, depth + 1)) return false;
      *tail = child;
      tail = &child->next;
      ++out->size;
      SkipSpace();
      if (Peek() == close) return ++at_, true;
      if (Peek() != ',') return Error("',' or a closing bracket was expected");
      ++at_;
    }
  }

  bool ParseKey(const Json* object, Json* child) {
    SkipSpace();
    if (Peek() != '"') return Error("a key was expected");
    if (!ParseString(&child->key)) return false;
    if (object->Find(child->key) != nullptr) return Error("duplicate key");
    SkipSpace();
    if (Peek() != ':') return Error("':' was expected");
    ++at_;
    return true;
  }

  bool ParseString(const char** out) {
    const char* close = ++at_;
    while (close < end_ && *close != '"') close += (*close == '\\') ? 2 : 1;
    if (close >= end_) return Error("unterminated string");
    // An escape never takes more bytes decoded than written.
    char* text = arena_.NewArray<char>(static_cast<int>(close - at_) + 1).data;
    char* to = text;
    while (at_ < close) {
      if (static_cast<unsigned char>(*at_) < 0x20) return Error("control character in a string");
      if (*at_ != '\\') {
        *to++ = *at_++;
      } else if (!ParseEscape(&to)) {
        return false;
      }
    }
    ++at_;
    *out = text;
    return true;
  }

  bool ParseEscape(char** to) {
    static constexpr char kEscapes[] = "\"\"\\\\//b\bf\fn\nr\rt\t";
    const char code = at_[1];
    if (code == 'u') return ParseUnicodeEscape(to);
    for (const char* pair = kEscapes; *pair != '\0'; pair += 2) {
      if (*pair != code) continue;
      *(*to)++ = pair[1];
      at_ += 2;
      return true;
    }
    return Error("unknown escape");
  }

  bool ParseUnicodeEscape(char** to) {
    uint32_t code = 0;
    if (!ParseHex(&code)) return false;
    if (code >= 0xD800 && code < 0xDC00) {
      uint32_t low = 0;
      if (end_ - at_ < 2 || at_[0] != '\\' || at_[1] != 'u' || !ParseHex(&low) || low < 0xDC00 || low > 0xDFFF) {
        return Error("half of a surrogate pair");
      }
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    if (code == 0) return Error("NUL in a string");
    AppendUtf8(code, to);
    return true;
  }

  bool ParseHex(uint32_t* out) {
    if (end_ - at_ < 6) return Error("short \\u escape");
    for (int i = 2; i < 6; ++i) {
      const char c = at_[i];
      const int digit = c >= '0' && c <= '9'   ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : -1;
      if (digit < 0) return Error("bad \\u escape");
      *out = *out * 16 + static_cast<uint32_t>(digit);
    }
    at_ += 6;
    return true;
  }

  static void AppendUtf8(uint32_t code, char** to) {
    char* p = *to;
    if (code < 0x80) {
      *p++ = static_cast<char>(code);
    } else if (code < 0x800) {
      *p++ = static_cast<char>(0xC0 | (code >> 6));
      *p++ = static_cast<char>(0x80 | (code & 0x3F));
    } else if (code < 0x10000) {
      *p++ = static_cast<char>(0xE0 | (code >> 12));
      *p++ = static_cast<char>(0x80 | ((code >> 6) & 0x3F));
      *p++ = static_cast<char>(0x80 | (code & 0x3F));
    } else {
      *p++ = static_cast<char>(0xF0 | (code >> 18));
      *p++ = static_cast<char>(0x80 | ((code >> 12) & 0x3F));
      *p++ = static_cast<char>(0x80 | ((code >> 6) & 0x3F));
      *p++ = static_cast<char>(0x80 | (code & 0x3F));
    }
    *to = p;
  }

  Arena& arena_;
  const char* begin_;
  const char* at_;
  const char* end_;
};

}  // namespace

const Json* Json::Find(const char* name) const {
  if (type != Type::kObject) return nullptr;
  for (const Json* child = first; child != nullptr; child = child->next) {
    if (strcmp(child->key, name) == 0) return child;
  }
  return nullptr;
}

const Json* ParseJson(Arena& arena, const char* text, size_t size) { return Parser(arena, text, size).ParseDocument(); }

}  // namespace tkbuild
