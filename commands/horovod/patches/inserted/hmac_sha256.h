// SHA-256 (FIPS 180-4) and HMAC (RFC 2104), in hexadecimal digits: Horovod links no library that has them.
// The patch 0025-ranks-sign-requests puts this into Horovod's http_store.cc.

#include <array>
#include <cstdint>
#include <string>

namespace horovod {
namespace common {
namespace {

using Digest = std::array<uint8_t, 32>;

Digest Sha256(std::string message) {
  static const uint32_t k[64] = {
      0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
      0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
      0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
      0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
      0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
      0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
      0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
      0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
  uint32_t h[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                   0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const auto rotate = [](uint32_t x, int n) { return (x >> n) | (x << (32 - n)); };

  const uint64_t num_bits = uint64_t(message.size()) * 8;
  message.push_back(char(0x80));
  message.resize((message.size() + 8 + 63) / 64 * 64 - 8);
  for (int shift = 56; shift >= 0; shift -= 8) {
    message.push_back(char(num_bits >> shift));
  }

  for (size_t block = 0; block < message.size(); block += 64) {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i) {
      w[i] = 0;
      for (int j = 0; j < 4; ++j) {
        w[i] = w[i] << 8 | uint8_t(message[block + 4 * i + j]);
      }
    }
    for (int i = 16; i < 64; ++i) {
      const uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3;
      const uint32_t s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10;
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    uint32_t v[8];
    std::copy(h, h + 8, v);
    for (int i = 0; i < 64; ++i) {
      const uint32_t s1 = rotate(v[4], 6) ^ rotate(v[4], 11) ^ rotate(v[4], 25);
      const uint32_t choice = (v[4] & v[5]) ^ (~v[4] & v[6]);
      const uint32_t s0 = rotate(v[0], 2) ^ rotate(v[0], 13) ^ rotate(v[0], 22);
      const uint32_t majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
      const uint32_t sum = v[7] + s1 + choice + k[i] + w[i];
      std::copy_backward(v, v + 7, v + 8);
      v[4] += sum;
      v[0] = sum + s0 + majority;
    }
    for (int i = 0; i < 8; ++i) {
      h[i] += v[i];
    }
  }

  Digest digest;
  for (int i = 0; i < 32; ++i) {
    digest[i] = uint8_t(h[i / 4] >> (24 - i % 4 * 8));
  }
  return digest;
}

std::string Hex(const Digest& digest) {
  std::string digits;
  for (uint8_t byte : digest) {
    digits += "0123456789abcdef"[byte >> 4];
    digits += "0123456789abcdef"[byte & 15];
  }
  return digits;
}

// The key must not be longer than a block of 64 bytes.
std::string HmacSha256(std::string key, const std::string& message) {
  key.resize(64);
  std::string inner, outer;
  for (char byte : key) {
    inner += char(byte ^ 0x36);
    outer += char(byte ^ 0x5c);
  }
  const Digest digest = Sha256(inner + message);
  return Hex(Sha256(outer + std::string(digest.begin(), digest.end())));
}

} // namespace
} // namespace common
} // namespace horovod
