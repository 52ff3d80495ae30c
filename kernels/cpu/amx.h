// Tiles: products of sixteen rows at a time with sixteen columns, where the processor has them (Intel's AMX). A thread sets their
// shapes before it uses them and gives them back afterwards: PyTorch's own products set theirs.
#pragma once
#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__linux__)
#define MLA_HAS_AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace mla {

// Whether the kernel lets this process use them: the registers are large, so it wants to be asked.
inline bool tiles_allowed() {
  constexpr int request = 0x1023, data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool allowed = syscall(SYS_arch_prctl, request, data) == 0;
  return allowed;
}

struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row
  uint8_t rows[16] = {};
  TileShapes(int rows_of_first_six, int rows_of_last_two) {
    for (int i = 0; i < 8; i++) {
      bytes[i] = 64;
      rows[i] = (uint8_t)(i < 6 ? rows_of_first_six : rows_of_last_two);
    }
  }
};
inline void set_tiles(const TileShapes& shapes) { _tile_loadconfig(&shapes); }

}  // namespace mla
#endif
