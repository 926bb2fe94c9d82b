#include "elf.h"

#include <elf.h>
#include <string.h>

namespace tkbuild {
namespace {

bool Inside(uint64_t offset, uint64_t length, size_t size) { return offset <= size && length <= size - offset; }

}  // namespace

const char* FindElfDamage(const char* bytes, size_t size) {
  Elf64_Ehdr header;
  if (size < sizeof(header)) return "shorter than an ELF header";
  memcpy(&header, bytes, sizeof(header));
  if (memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_ident[EI_CLASS] != ELFCLASS64)
    return "no 64-bit ELF file";
  if (!Inside(header.e_phoff, uint64_t{header.e_phnum} * header.e_phentsize, size))
    return "its program headers are cut off";
  if (!Inside(header.e_shoff, uint64_t{header.e_shnum} * header.e_shentsize, size))
    return "its section headers are cut off";
  if (header.e_shnum != 0 && header.e_shentsize != sizeof(Elf64_Shdr)) return "its section headers have another size";
  for (unsigned i = 0; i < header.e_shnum; ++i) {
    Elf64_Shdr section;
    memcpy(&section, bytes + header.e_shoff + i * sizeof(section), sizeof(section));
    if (section.sh_type != SHT_NOBITS && !Inside(section.sh_offset, section.sh_size, size))
      return "a section is cut off";
  }
  return nullptr;
}

}  // namespace tkbuild
